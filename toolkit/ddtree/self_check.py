"""Checks that a live engine computes what it should, each by another way than the one it decodes by.

Everything runs on a twin of the engine (same weights, caches of its own), so requests in flight are not
touched. The models are recomputed by the plain reference from the checkpoint files, trees by forwards of one
row at a time, K/V of requests in flight by a prefill of their tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.model_runner import ModelRunner
from toolkit.ddtree.models.config import DrafterConfig, read_drafter_config, read_target_config
from toolkit.ddtree.models.dflash import DFlashDrafter
from toolkit.ddtree.models.heads import scaled
from toolkit.ddtree.models.layers import Rows
from toolkit.ddtree.models.loading import load_drafter_weights, load_target_weights
from toolkit.ddtree.models.reference import Weights, drafter_forward, target_forward
from toolkit.ddtree.tree import DraftTrees
from toolkit.ddtree.types import Expansion, Request, SamplingParams, TreeLimits

_log = logging.getLogger(__name__)
_RELATIVE = {"float32": 1e-3, "bfloat16": 0.08}
_CHANGED = 1e-4  # relative difference of logits that a hidden ancestor must at least make
_TEXT = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n"
_LONGEST_PROMPT = 48
_SIBLINGS = 8  # nodes of the checked tree besides its chain
_LIVE_REQUESTS = 4
_LIVE_ROWS = 1024
_VARIED = 8  # distinct tokens that a continuation needs, to tell drafters apart
_ANCHORS = range(0, 40, 4)


@dataclass(frozen=True, slots=True)
class Check:
    """One check's result.

    Attributes:
        name: what was checked.
        ok: whether it holds.
        measured: what was measured, mostly the largest difference relative to the largest value.
        limit: what it was judged by.
        detail: in words: what was compared, or what is wrong.
    """

    name: str
    ok: bool
    measured: float
    limit: float
    detail: str


_Named = tuple[str, Callable[[], Check]]


@torch.inference_mode()
def self_check(engine: Engine) -> list[dict[str, Any]]:
    """Run all checks that the engine's decoding mode has.

    Args:
        engine: an engine between two rounds; its requests may be running.

    Returns:
        One {name, ok, measured, limit, detail} a check. A check that cannot run counts as failed.
    """
    checks: list[_Named] = [("requests_in_flight", lambda: _requests_in_flight(engine))]
    try:
        checks += _Scene(engine).checks()
    except Exception as error:
        _log.exception("the self-check could not decode")
        failure = Check("decode", ok=False, measured=0.0, limit=0.0, detail=f"decoding failed: {error}")
        checks.append(("decode", lambda: failure))
    return [asdict(_guarded(name, check)) for name, check in checks]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        _log.exception("self-check %s could not run", name)
        return Check(name, ok=False, measured=0.0, limit=0.0, detail=f"could not run: {error}")


class _Scene:
    """A prompt that a twin has prefilled, and what the reference makes of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine.twin()
        self.relative = _RELATIVE[engine.config.dtype]
        self.prompt = _prompt(engine)
        sampling = SamplingParams(max_new_tokens=engine.context_length, temperature=0.0, ignore_eos=True)
        self.engine.add(Request("self-check", self.prompt, sampling))
        self.engine.step()
        self.root = self.engine._running[0].root
        cpu = torch.device("cpu")
        path = engine.config.model_path
        self.config = read_target_config(path)
        self.weights = load_target_weights(path, self.config, torch.float32, cpu)
        self.logits, self.outputs = target_forward(self.config, self.weights, self.prompt)
        self.drafting = None if engine.models.drafter is None else _Drafting(self, engine.models.drafter)

    def checks(self) -> list[_Named]:
        """The checks that this engine's decoding mode has."""
        drafted = [] if self.drafting is None else self.drafting.checks()
        return [("target_logits", self.target_logits), *drafted]

    def same(self, name: str, ours: Tensor, theirs: Tensor, what: str) -> Check:
        """Compare two tensors that should agree but for rounding."""
        scale = max(1.0, float(theirs.abs().max()))
        measured = float((ours.float().cpu() - theirs.float().cpu()).abs().max()) / scale
        return Check(name, measured <= self.relative, measured, self.relative, what)

    def target_logits(self) -> Check:
        models = self.engine.twin().models
        hidden, _ = models.append(self.prompt)
        return self.same(
            "target_logits", models.target.logits(hidden), self.logits, "prefill against the plain reference"
        )


class _Verified(NamedTuple):
    """A tree, and what `Engine._verify` gave for it."""

    trees: DraftTrees
    seen: Tensor
    rows: Rows
    hidden: Tensor
    captured: Tensor | None

    @property
    def parents(self) -> list[int]:
        """Parents of root, nodes and padding."""
        return [int(parent) for parent in self.trees.parents[0].tolist()]

    @property
    def nodes(self) -> range:
        """The nodes, without root and padding."""
        return range(1, int(self.trees.counts[0]) + 1)

    def path(self, node: int) -> list[int]:
        """Ancestors of a node from the root on, and itself."""
        path = [node]
        while self.parents[path[0]] != path[0]:
            path.insert(0, self.parents[path[0]])
        return path

    def deepest(self, nodes: Iterable[int]) -> int:
        """The deepest of some nodes."""
        return max(nodes, key=lambda node: len(self.path(node)))


class _Drafting:
    """The same scene, drafted and verified: what speculative decoding adds."""

    def __init__(self, scene: _Scene, drafter: DFlashDrafter) -> None:
        self.scene = scene
        self.drafter = drafter
        engine = scene.engine
        self.models = engine.models
        self.length = len(scene.prompt)
        path = engine.config.draft_model_path
        if path is None:
            raise ValueError("the engine has a drafter without a path")
        config = read_drafter_config(path)
        self.config: DrafterConfig = replace(config, block_size=engine.block_size)
        self.weights: Weights = load_drafter_weights(path, config, torch.float32, torch.device("cpu"))
        self.roots = torch.tensor([scene.root], device=self.models.device)

    @cached_property
    def draft_logits(self) -> Tensor:
        """What the drafter proposes after the prompt, [1, block_size - 1, vocabulary]."""
        return self.models.draft(self.roots, [self.length])

    @cached_property
    def verified(self) -> _Verified:
        """A tree of the chain and some siblings, verified."""
        trees = self._tree(Expansion.CHAIN_SEEDED, self.config.block_size - 1 + _SIBLINGS)
        return _Verified(trees, *self.scene.engine._verify(trees, [self.length]))

    def checks(self) -> list[_Named]:
        """The checks, in an order in which the first to fail is nearest to the cause."""
        return [
            ("draft_block", self.draft_block),
            ("shared_head", self.shared_head),
            ("captured_layers", self.captured_layers),
            ("draft_logits", self.draft_logits_match),
            ("target_layer_ids", self.target_layer_ids),
            ("node_positions", self.node_positions),
            ("ancestor_mask", self.ancestor_mask),
            ("node_logits", self.node_logits),
            ("mask_perturbation", self.mask_perturbation),
            ("causal_mask", self.causal_mask),
            ("accepted_kv", self.accepted_kv),
        ]

    def draft_block(self) -> Check:
        """Slot 0 is the bonus token, and as many masks follow as the block has slots left."""
        block = self.drafter.block(self.roots).tolist()
        expected = [self.scene.root] + [self.config.mask_token_id] * (self.config.block_size - 1)
        wrong = sum(a != b for a, b in zip(block, expected, strict=False)) + abs(len(block) - len(expected))
        detail = "the bonus token, then mask tokens"
        if wrong and block[0] != self.scene.root:
            detail = f"slot 0 holds token {block[0]}, not the bonus token {self.scene.root}"
        elif wrong:
            detail = f"the block is {block}, not {expected}"
        return Check("draft_block", wrong == 0, wrong, 0, detail)

    def shared_head(self) -> Check:
        """The drafter's head is the target's, behind the drafter's own norm."""
        head = self.scene.weights.get("lm_head.weight", self.scene.weights["model.embed_tokens.weight"])
        expected = scaled(head.to(self.drafter.head.weight.dtype), self.weights["norm.weight"])
        return self.scene.same(
            "shared_head", self.drafter.head.weight, expected, "the drafter's head against the target's"
        )

    def captured_layers(self) -> Check:
        """The hidden states given to the drafter are the outputs of the layers that its config names."""
        _, captured = self.scene.engine.twin().models.append(self.scene.prompt)
        if captured is None:
            raise ValueError("the target captured nothing")
        expected = torch.cat([self.scene.outputs[layer] for layer in self.config.target_layer_ids], dim=1)
        layers = ", ".join(map(str, self.config.target_layer_ids))
        return self.scene.same("captured_layers", captured, expected, f"outputs of target layers {layers}")

    def draft_logits_match(self) -> Check:
        """The draft over cached context equals the reference's."""
        expected = self._reference_draft(self.config.target_layer_ids, self.scene.outputs, self.scene.root)
        return self.scene.same(
            "draft_logits", self.draft_logits[0], expected, "draft against the plain reference"
        )

    def target_layer_ids(self) -> Check:
        """No neighbouring layers would serve the drafter better than those of its config."""
        continuation = self._continuation(max(_ANCHORS) + self.config.block_size)
        if len(set(continuation)) < _VARIED:
            detail = "not judged: the target's continuation repeats itself"
            return Check("target_layer_ids", True, 0.0, 0.0, detail)
        tokens = [*self.scene.prompt, *continuation]
        _, outputs = target_forward(self.scene.config, self.scene.weights, tokens)
        own = self.config.target_layer_ids
        scores = {0: self._matched(own, outputs, tokens)}
        for shift in (-1, 1):
            layers = tuple(layer + shift for layer in own)
            if 0 <= min(layers) <= max(layers) < len(outputs):
                scores[shift] = self._matched(layers, outputs, tokens)
        best = max(scores, key=lambda shift: scores[shift])
        gain = scores[best] - scores[0]
        limit = 0.5 + 0.25 * scores[0]
        detail = f"{scores[0]:.2f} drafted tokens a block match with layers {list(own)}"
        if gain > limit:
            detail += f", {scores[best]:.2f} with each moved by {best:+d}: the config is off by one"
        return Check("target_layer_ids", gain <= limit, gain, limit, detail)

    def node_positions(self) -> Check:
        """Each node stands at the root's position plus its depth."""
        tree = self.verified
        expected = torch.tensor([self.length + len(tree.path(i)) - 1 for i in range(len(tree.parents))])
        wrong = int((tree.rows.positions.cpu() != expected).sum())
        return Check("node_positions", wrong == 0, wrong, 0, f"{wrong} of {len(expected)} rows stand wrong")

    def ancestor_mask(self) -> Check:
        """Each node sees the prefix, its ancestors and itself, and nothing else."""
        tree = self.verified
        if tree.rows.mask is None:
            return Check("ancestor_mask", False, 1.0, 0.0, "the tree was verified without a mask")
        seen = tree.rows.mask[0, 0].cpu() == 0
        expected = torch.zeros_like(seen)
        expected[:, : self.length] = True
        for node in range(len(tree.parents)):
            expected[node, [self.length + other for other in tree.path(node)]] = True
        wrong = int((seen != expected).sum())
        return Check(
            "ancestor_mask", wrong == 0, wrong, 0, f"{wrong} of {seen.numel()} mask entries are wrong"
        )

    def node_logits(self) -> Check:
        """Logits of root and nodes equal those of their paths, fed one row at a time."""
        tree = self.verified
        models = self.scene.engine.twin().models
        models.append(self.scene.prompt)
        expected = torch.stack([self._plain_path(models, tree.path(node)) for node in (0, *tree.nodes)])
        ours = models.target.logits(tree.hidden)[: len(expected)]
        return self.scene.same(
            "node_logits", ours, expected, f"{len(tree.nodes)} nodes against their own paths"
        )

    def mask_perturbation(self) -> Check:
        """Hiding a node's parent from it changes its logits."""
        tree = self.verified
        node = tree.deepest(tree.nodes)
        seen = tree.seen.clone()
        seen[0, node, tree.parents[node]] = False
        models = self.models.twin()
        models.append(self.scene.prompt)
        hidden, _ = models.forward(tree.trees.tokens, models.rows(0, [self.length], tree.trees.depths, seen))
        before, after = (models.target.logits(x[node : node + 1]) for x in (tree.hidden, hidden))
        measured = float((before - after).abs().max()) / max(1.0, float(before.abs().max()))
        detail = f"node {node} without its parent: the difference must be above the limit"
        return Check("mask_perturbation", measured > _CHANGED, measured, _CHANGED, detail)

    def causal_mask(self) -> Check:
        """A chain verified as a tree equals the same chain under an ordinary causal mask."""
        chain = self._tree(Expansion.CHAIN, self.config.block_size - 1)
        engine = self.scene.engine.twin()
        engine.models.append(self.scene.prompt)
        _, _, hidden, _ = engine._verify(chain, [self.length])
        plain, _ = engine.models.append(chain.tokens[0].tolist(), self.length)
        ours, expected = (engine.models.target.logits(x) for x in (hidden, plain))
        return self.scene.same("causal_mask", ours, expected, "a chain as a tree against a causal forward")

    def accepted_kv(self) -> Check:
        """After a path off the chain is accepted, K/V and drafter context are those of its tokens alone."""
        tree = self.verified
        path = tree.path(tree.deepest(node for node in tree.nodes if node >= self.config.block_size))
        engine = self.scene.engine
        engine._verify(tree.trees, [self.length])
        self.models.extend_context(tree.captured, tree.rows, [path])
        engine._compact([path])
        tokens = [*self.scene.prompt, *(int(tree.trees.tokens[0, node]) for node in path)]
        measured = _kv_difference(engine, 0, tokens)
        limit = self.scene.relative
        return Check(
            "accepted_kv", measured <= limit, measured, limit, f"nodes {path[1:]} of a tree accepted"
        )

    def _tree(self, expansion: Expansion, budget: int) -> DraftTrees:
        trees, _ = self.models.grow(self.draft_logits, self.roots, [TreeLimits(budget, 4, expansion)])
        return trees

    def _plain_path(self, models: ModelRunner, path: list[int]) -> Tensor:
        """Logits after a path, fed row by row behind the prompt."""
        tokens = self.verified.trees.tokens[0]
        logits = [
            models.target.logits(models.append([int(tokens[node])], self.length + depth)[0])
            for depth, node in enumerate(path)
        ]
        return logits[-1][0]

    def _continuation(self, count: int) -> list[int]:
        """The target's greedy continuation, plainly decoded."""
        models = self.scene.engine.twin().models
        hidden, _ = models.append(self.scene.prompt)
        tokens: list[int] = []
        for step in range(count):
            tokens.append(int(models.target.logits(hidden[-1:]).argmax()))
            hidden, _ = models.append(tokens[-1:], self.length + step)
        return tokens

    def _matched(self, layers: tuple[int, ...], outputs: list[Tensor], tokens: list[int]) -> float:
        """Drafted tokens that match the continuation, a block, if the drafter reads these layers."""
        total = 0
        for anchor in _ANCHORS:
            start = self.length + anchor
            drafted = self._reference_draft(layers, [x[:start] for x in outputs], tokens[start]).argmax(-1)
            expected = torch.tensor(tokens[start + 1 : start + self.config.block_size])
            total += int((drafted == expected).cumprod(0).sum())
        return total / len(_ANCHORS)

    def _reference_draft(self, layers: tuple[int, ...], outputs: list[Tensor], bonus: int) -> Tensor:
        config = replace(self.config, target_layer_ids=layers)
        return drafter_forward(config, self.weights, self.scene.weights, outputs, bonus)


def _requests_in_flight(engine: Engine) -> Check:
    """K/V and drafter context of requests in flight equal those of a prefill of their tokens."""
    checked = [
        (slot, running)
        for slot, running in enumerate(engine._running)
        if running.length <= _LIVE_ROWS and running.length < len(running.tokens)
    ][:_LIVE_REQUESTS]
    relative = _RELATIVE[engine.config.dtype]
    worst = 0.0
    for slot, running in checked:
        worst = max(worst, _kv_difference(engine, slot, running.tokens[: running.length]))
    return Check(
        "requests_in_flight", worst <= relative, worst, relative, f"{len(checked)} requests recomputed"
    )


def _kv_difference(engine: Engine, slot: int, tokens: list[int]) -> float:
    """Largest difference, relative to the largest value, of a slot's K/V from a prefill of its tokens."""
    twin = engine.twin().models
    twin.append(tokens)
    pairs = zip(engine.models.save(slot, len(tokens)), twin.save(0, len(tokens)), strict=True)
    return max(float((ours - own).abs().max() / own.abs().max().clamp(min=1.0)) for ours, own in pairs)


def _prompt(engine: Engine) -> tuple[int, ...]:
    """A short text; token ids in order where there is no tokenizer."""
    vocabulary = engine.models.target.config.vocab_size
    tokens = engine.encode(_TEXT) if engine.tokenizer is not None else list(range(vocabulary))
    longest = min(_LONGEST_PROMPT, engine.context_length - 2 * max(_ANCHORS))
    return tuple(tokens[: max(1, longest)])
