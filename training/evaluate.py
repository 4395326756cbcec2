"""Acceptance length by replay, and how repetitive the target's text is.

Speculative decoding is lossless, so the committed text does not depend on the tree: the target's continuation
is made once by plain decoding, the drafter's marginals are computed at each of its positions, and every tree
shape is replayed against it. This is as exact for sampled continuations as for greedy ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from toolkit.ddtree.policies import Children, Node, expand
from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.types import Expansion, TreeLimits
from training.generate import continue_rows
from training.modules import Drafter, Target, draft_blocks

TREE_BUDGETS = (7, 16, 32)
TOPK_CAP = 8


@dataclass(frozen=True)
class Pair:
    """Both models and what it takes to run them together."""

    target: Target
    drafter: Drafter
    capture: tuple[int, ...]
    block_size: int
    mask_id: int
    table: tuple[Tensor, Tensor]


@torch.inference_mode()
def draft_candidates(pair: Pair, rows: Tensor, first: int, chunk: int = 32) -> tuple[Tensor, Tensor]:
    """Top candidates of each draft slot at every anchor from ``first`` on.

    Args:
        pair: The models.
        rows: int64 [n, T].
        first: First anchor position; the last is T - block_size.
        chunk: Anchors a forward.

    Returns:
        Tokens int64 and log-probabilities float32, both [n, anchors, block_size - 1, TOPK_CAP].
    """
    tokens, scores = [], []
    for part in rows.split(16):
        _, features = pair.target(part, pair.table, pair.capture)
        part_tokens, part_scores = [], []
        for anchors in torch.arange(first, rows.shape[1] - pair.block_size + 1, device=rows.device).split(
            chunk
        ):
            slots, positions, mask = draft_blocks(
                part, anchors.expand(len(part), -1), pair.block_size, pair.mask_id
            )
            hidden = pair.drafter(pair.target.embed_tokens(slots), features, positions, mask, pair.table)
            hidden = hidden.unflatten(1, (len(anchors), pair.block_size))[:, :, 1:]
            top = pair.target.logits(hidden).log_softmax(-1).topk(TOPK_CAP)
            part_tokens.append(top.indices)
            part_scores.append(top.values)
        tokens.append(torch.cat(part_tokens, 1))
        scores.append(torch.cat(part_scores, 1))
    return torch.cat(tokens), torch.cat(scores)


def replay(
    truth: Sequence[int], tokens: Sequence[Any], tree_at: Callable[[int], list[Node]]
) -> tuple[int, int]:
    """Decode one continuation with trees of one kind.

    Args:
        truth: The continuation; its first token is the first bonus token.
        tokens: Candidates by anchor, slot and rank.
        tree_at: Gives the tree of an anchor.

    Returns:
        Tokens committed and verify steps, over the steps that fit in the continuation.
    """
    position = steps = 0
    while position < len(tokens):
        nodes = enumerate(tree_at(position), 1)
        children = {(n.parent, tokens[position][n.depth - 1][n.rank]): i for i, n in nodes}
        node = matched = 0
        while (node := children.get((node, truth[position + matched + 1]), 0)) != 0:
            matched += 1
            if position + matched + 1 == len(truth):
                break
        position += matched + 1
        steps += 1
    return position, steps


def distinct_bigram_ratio(row: Sequence[int]) -> float:
    """Share of a text's adjacent token pairs that are different pairs."""
    pairs = list(pairwise(row))
    return len(set(pairs)) / len(pairs)


@dataclass(frozen=True)
class Drafted:
    """Continuations of prompts, with the drafter's candidates at each of their positions.

    Attributes:
        texts: Continuations, [n][T - first].
        tokens: Candidates [n][anchors][slots][TOPK_CAP].
        scores: Their log-probabilities, float32 [n, anchors, slots, TOPK_CAP].
    """

    texts: list[list[int]]
    tokens: list[Any]
    scores: Tensor

    @classmethod
    def of(cls, pair: Pair, rows: Tensor, first: int) -> Drafted:
        """Draft at every position of rows int64 [n, T] from ``first`` on."""
        tokens, scores = draft_candidates(pair, rows, first)
        return cls(rows[:, first:].tolist(), tokens.tolist(), scores.cpu())

    def acceptance(self, limits: TreeLimits, table: TransitionTable | None = None) -> tuple[float, int]:
        """Acceptance length, bonus token included, and verify steps."""
        committed = steps = 0
        for text, tokens, scores in zip(self.texts, self.tokens, self.scores, strict=True):
            row = replay(text, tokens, self._trees(text, tokens, scores, limits, table))
            committed, steps = committed + row[0], steps + row[1]
        return committed / steps, steps

    @staticmethod
    def _trees(
        text: list[int], tokens: Any, scores: Tensor, limits: TreeLimits, table: TransitionTable | None
    ) -> Callable[[int], list[Node]]:
        logprobs = scores.tolist()
        if table is None:
            return lambda anchor: expand(logprobs[anchor], limits)
        caps = torch.full((len(tokens),), limits.topk_cap)
        ranked = table.rank_children(scores, torch.tensor(tokens), torch.tensor(text[: len(tokens)]), caps)
        children = [
            Children(*row) for row in zip(ranked.logprobs.tolist(), ranked.ranks.tolist(), strict=True)
        ]
        return lambda anchor: expand(logprobs[anchor], limits, children[anchor])


def continue_prompts(pair: Pair, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    """Continue prompts int64 [n, P] by ``new_tokens``, by plain decoding: int64 [n, P + new_tokens]."""
    generator = torch.Generator(prompts.device).manual_seed(seed)
    length = prompts.shape[1]
    lengths = torch.full((len(prompts),), length, device=prompts.device)
    total = length + new_tokens
    return continue_rows(pair.target, prompts, lengths, total, temperature, pair.table, generator).clone()


def measure(drafted: Drafted, table: TransitionTable) -> dict[str, float]:
    """Replay linear DFLASH, and DDTREE with and without a transition table.

    Returns:
        Acceptance lengths (bonus token included) by mode, the distinct-bigram ratio, and the number of linear
        steps.
    """
    chain, steps = drafted.acceptance(TreeLimits(len(drafted.tokens[0][0]), 1))
    result: dict[str, float] = {"dflash": chain, "dflash_steps": steps}
    for budget in TREE_BUDGETS:
        result[f"ddtree_{budget}"] = drafted.acceptance(TreeLimits(budget, TOPK_CAP))[0]
        limits = TreeLimits(budget, TOPK_CAP, Expansion.TRANSITION)
        result[f"transition_{budget}"] = drafted.acceptance(limits, table)[0]
    ratios = map(distinct_bigram_ratio, drafted.texts)
    result["distinct_bigram_ratio"] = sum(ratios) / len(drafted.texts)
    return {name: value if name == "dflash_steps" else round(value, 3) for name, value in result.items()}


def tune(drafted: Drafted, factors: dict[str, Tensor], choices: Sequence[float]) -> dict[float, float]:
    """How well a table does by how much it counts: mean acceptance length over the budgets, by strength."""
    found = {}
    for strength in choices:
        table = TransitionTable.quantised(factors, factors["strengths"] * strength)
        lengths = [
            drafted.acceptance(TreeLimits(budget, TOPK_CAP, Expansion.TRANSITION), table)[0]
            for budget in TREE_BUDGETS
        ]
        found[strength] = round(sum(lengths) / len(lengths), 4)
    return found
