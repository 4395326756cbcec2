"""The embedded engine: one batch of requests, decoded round by round, plainly or speculatively.

A request that runs has `length` committed K/V rows and one token more: its last one, the root of the next
round, whose row that round writes. Requests join between rounds by a prefill, which samples their first
token, and leave when they end. One thread drives an engine.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from toolkit.ddtree.cache import Prefix, PrefixCache, SlotCache
from toolkit.ddtree.models.config import read_target_config
from toolkit.ddtree.models.dflash import DFlashDrafter
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.models.layers import Rows, attention_mask
from toolkit.ddtree.models.qwen3 import Qwen3Target
from toolkit.ddtree.running import Running
from toolkit.ddtree.sampling import Sampler, argmax, check_sampling
from toolkit.ddtree.stopping import StopStrings
from toolkit.ddtree.tree import BatchLimits, ancestor_mask, build_trees, topk_logprobs
from toolkit.ddtree.types import (
    Algorithm,
    EngineConfig,
    FinishReason,
    Output,
    Request,
    RoundStats,
    TreeLimits,
)
from toolkit.ddtree.walk import round_stats, walk

_log = logging.getLogger(__name__)
_PREFILL_ROWS = 1024
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started, and how it stands.

    Attributes:
        running: requests in the batch.
        waiting: requests not yet in it.
        cached_tokens: tokens in the prefix cache.
        rounds: verify steps, counted once a request.
        generated_tokens: output tokens.
        accepted_histogram: how many verify steps accepted 0, 1, 2 ... draft tokens.
    """

    running: int = 0
    waiting: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    generated_tokens: int = 0
    accepted_histogram: list[int] = field(default_factory=list)


class Engine:
    """Serves requests with one target and, unless it decodes plainly, one drafter.

    Args:
        config: how to build it.

    Raises:
        CheckpointError: a checkpoint cannot be served.
        ValueError: the config cannot be.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self._device = torch.device(config.device)
        self._dtype = _dtype(config.dtype)
        self.context_length = _context_length(config)
        self.target = Qwen3Target.load(
            config.model_path, self.context_length + _PREFILL_ROWS, self._dtype, self._device
        )
        self.tokenizer = _load_tokenizer(config.model_path, self.target.config.vocab_size)
        self.drafter: DFlashDrafter | None = None
        self.block_size = 1
        if config.algorithm is not Algorithm.NONE:
            self.drafter = _load_drafter(config, self.target)
            self.block_size = self.drafter.block_size
        _check_limits(config, self.block_size)
        self._target_cache = self.target.new_cache()
        self._draft_cache = None if self.drafter is None else self.drafter.new_cache()
        self._caches = [cache for cache in (self._target_cache, self._draft_cache) if cache is not None]
        self._prefixes = PrefixCache(config.prefix_cache_tokens)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._ended: list[Output] = []
        self._stats = EngineStats(accepted_histogram=[0] * self.block_size)
        self._seeded = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._running or self._ended)

    @property
    def stats(self) -> EngineStats:
        """How the engine stands."""
        self._stats.running = len(self._running)
        self._stats.waiting = len(self._waiting)
        self._stats.cached_tokens = self._prefixes.tokens
        return self._stats

    @property
    def model_info(self) -> dict[str, Any]:
        """Facts about the models, for `/model_info`."""
        target = self.target.config
        return {
            "model_path": str(self.config.model_path),
            "draft_model_path": None
            if self.config.draft_model_path is None
            else str(self.config.draft_model_path),
            "vocab_size": target.vocab_size,
            "context_length": self.context_length,
            "num_hidden_layers": target.num_hidden_layers,
            "hidden_size": target.hidden_size,
            "eos_token_ids": sorted(target.eos_token_ids),
            "block_size": self.block_size,
            "algorithm": self.config.algorithm.value,
            "dtype": self.config.dtype,
            "device": self.config.device,
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds.

        Raises:
            ValueError: the checkpoint has no tokenizer.
        """
        return list(self._need_tokenizer().encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens.

        Raises:
            ValueError: the checkpoint has no tokenizer.
        """
        return str(self._need_tokenizer().decode(list(tokens), skip_special_tokens=True))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the request cannot be served as asked; the message says why.
        """
        self._check(request)
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self.target.config.eos_token_ids
        stop_ids = eos | sampling.stop_token_ids
        seed = sampling.sampling_seed
        if seed is None:
            seed = _derived_seed(self.config.random_seed, self._seeded)
            self._seeded += 1
        self._waiting.append(
            Running(
                request=request,
                sampler=Sampler(
                    sampling, seed, stop_ids, request.input_ids, self.target.config.vocab_size, self._device
                ),
                limits=request.limits or self.config.limits,
                stop_ids=stop_ids,
                stop_strings=StopStrings(sampling.stop, self.decode) if sampling.stop else None,
                max_new_tokens=min(sampling.max_new_tokens, self.context_length - len(request.input_ids)),
                tokens=list(request.input_ids),
            )
        )

    @torch.inference_mode()
    def abort(self, rid: str) -> None:
        """End a request; the next step reports it. An unknown id is no error, for it may just have ended."""
        for waiting in self._waiting:
            if waiting.request.rid == rid:
                self._waiting.remove(waiting)
                self._ended.append(Output(rid, (), FinishReason.ABORT))
                return
        for slot, running in enumerate(self._running):
            if running.request.rid == rid:
                self._leave(slot)
                self._ended.append(Output(rid, (), FinishReason.ABORT))
                return

    def flush_cache(self) -> None:
        """Forget all prefixes."""
        self._prefixes.clear()

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Do the next piece of work: the prefill of requests that can join, else one round.

        A failure ends the requests it concerns with `FinishReason.ABORT`; it is logged, never raised.

        Returns:
            What requests gained or how they ended.
        """
        outputs, self._ended = self._ended, []
        try:
            joined = self._join()
            if joined:
                return outputs + self._prefill(joined)
            if self._running:
                return outputs + self._round()
        except Exception:
            _log.exception("a round failed; its requests are aborted")
            outputs += [Output(running.request.rid, (), FinishReason.ABORT) for running in self._running]
            self._running.clear()
            self._prefixes.clear()
        return outputs

    def _join(self) -> int:
        """Move waiting requests into the batch, with what the prefix cache has of them; how many."""
        room = min(self.config.max_running_requests - len(self._running), len(self._waiting))
        for _ in range(room):
            running = self._waiting.popleft()
            slot = len(self._running)
            count, saved = self._prefixes.longest(running.request.extra_key, running.tokens[:-1])
            self._reserve(slot + 1, count)
            for cache, rows in zip(self._caches, saved, strict=False):
                cache.restore(slot, rows[:, :count])
            running.length = running.cached_tokens = count
            self._running.append(running)
        return room

    def _prefill(self, joined: int) -> list[Output]:
        """Run the prompts of the last `joined` requests, padded, in pieces; sample a token each."""
        first = len(self._running) - joined
        batch = self._running[first:]
        last: dict[int, Tensor] = {}
        while any(running.pending for running in batch):
            counts = [min(running.pending, max(1, _PREFILL_ROWS // joined)) for running in batch]
            width = max(counts)
            padded = [
                running.tokens[running.length : running.length + count] + [0] * (width - count)
                for running, count in zip(batch, counts, strict=True)
            ]
            offsets = torch.arange(width, device=self._device).expand(joined, -1)
            rows = self._rows(first, joined, offsets, _causal(width, self._device))
            hidden, captured = self._forward(torch.tensor(padded, device=self._device), rows)
            self._extend_context(captured, rows, [list(range(count)) for count in counts])
            for i, (running, count) in enumerate(zip(batch, counts, strict=True)):
                running.length += count
                if count and not running.pending:
                    last[i] = hidden[i * width + count - 1]
        logits = self.target.logits(torch.stack([last[i] for i in range(joined)]))
        return self._commit(first, [[row] for row in self._choose_next(batch, logits)])

    def _round(self) -> list[Output]:
        if self.config.algorithm is Algorithm.NONE:
            return self._plain_round()
        if self.config.algorithm is Algorithm.DFLASH:
            return self._linear_round()
        return self._tree_round()

    def _plain_round(self) -> list[Output]:
        """One token for each request."""
        rows = self._rows(0, len(self._running), torch.zeros_like(self._roots()[:, None]), None)
        hidden, _ = self._forward(self._roots()[:, None], rows)
        chosen = self._choose_next(self._running, self.target.logits(hidden))
        for running in self._running:
            running.length += 1
        return self._commit(0, [[token] for token in chosen])

    def _linear_round(self) -> list[Output]:
        """Verify one greedy chain for each request: DFlash without a tree."""
        drafted = argmax(self._draft())
        tokens = torch.cat([self._roots()[:, None], drafted], dim=1)
        width = tokens.shape[1]
        depths = torch.arange(width, device=self._device).expand_as(tokens)
        causal = _causal(width, self._device)
        rows = self._rows(0, len(self._running), depths, causal)
        hidden, captured = self._forward(tokens, rows)
        logits = self.target.logits(hidden).view(*tokens.shape, -1)
        choices = self._choose(self._running, logits, tokens, depths, causal.expand(len(tokens), -1, -1))
        accepted = (choices[:, :-1] == drafted).cumprod(1).sum(1).tolist()
        committed = [row[: count + 1] for row, count in zip(choices.tolist(), accepted, strict=True)]
        stats = [
            RoundStats(
                nodes=width - 1, depth=width - 1, accepted=count, committed=count + 1, chain_in_tree=True,
                ranks=(0,) * count, reject_rank=None if count == width - 1 else -1,
            )
            for count in accepted
        ]  # fmt: skip
        return self._accept([list(range(count + 1)) for count in accepted], committed, stats, captured, rows)

    def _tree_round(self) -> list[Output]:
        """Draft, grow the trees, verify them in one forward, walk, commit."""
        limits = [running.limits for running in self._running]
        logprobs, candidates = topk_logprobs(self._draft(), max(limit.topk_cap for limit in limits))
        trees = build_trees(
            logprobs, candidates, self._roots(), BatchLimits.of(limits), max(limit.budget for limit in limits)
        )
        seen = ancestor_mask(trees)
        rows = self._rows(0, len(limits), trees.depths, seen)
        hidden, captured = self._forward(trees.tokens, rows)
        logits = self.target.logits(hidden).view(*trees.tokens.shape, -1)
        choices = self._choose(self._running, logits, trees.tokens, trees.depths, seen)
        walked = walk(trees, choices)
        stats = round_stats(trees, walked, candidates)
        paths = [path[: row.committed] for path, row in zip(walked.path.tolist(), stats, strict=True)]
        committed = [
            tokens[: row.committed]
            for tokens, row in zip(walked.committed(trees).tolist(), stats, strict=True)
        ]
        return self._accept(paths, committed, stats, captured, rows)

    def _draft(self) -> Tensor:
        """Draft logits of the running requests: [R, block_size - 1, vocabulary]."""
        requests = len(self._running)
        offsets = torch.arange(self.block_size, device=self._device).expand(requests, -1)
        rows = self._rows(0, requests, offsets, None)
        drafter, cache = self._need_drafter()
        return drafter.draft(drafter.block(self._roots()), rows, cache)

    def _forward(self, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Run rows [R, Q] through the target: last hidden states and captured ones, [R * Q, ...]."""
        capture = () if self.drafter is None else self.drafter.config.target_layer_ids
        return self.target.forward(tokens.flatten(), rows, self._target_cache, capture)

    def _rows(self, first: int, requests: int, offsets: Tensor, seen: Tensor | None) -> Rows:
        """Rows of requests in slots from `first` on, standing behind their committed rows.

        Args:
            first: first slot.
            requests: R.
            offsets: int64 [R, Q], position of each row behind the committed ones.
            seen: bool [R or 1, Q, Q], which new row sees which; None: all see all.
        """
        count = offsets.shape[1]
        lengths = [running.length for running in self._running[first : first + requests]]
        visible = max(lengths) + count
        self._reserve(first + requests, visible)
        starts = torch.tensor(lengths, device=self._device)
        slot_starts = (
            starts + torch.arange(first, first + requests, device=self._device) * self._target_cache.capacity
        )
        slots = slot_starts[:, None] + torch.arange(count, device=self._device)
        if seen is None and requests > 1:
            seen = torch.ones(1, count, count, dtype=torch.bool, device=self._device)
        return Rows(
            positions=(starts[:, None] + offsets).flatten(),
            slots=slots.flatten(),
            first=first,
            requests=requests,
            visible=visible,
            mask=None if seen is None else attention_mask(starts, seen, visible, self._dtype),
        )

    def _reserve(self, slots: int, rows: int) -> None:
        """Make room in every cache alike, so that a row has the same number in all of them."""
        for cache in self._caches:
            cache.reserve(slots, rows)

    def _roots(self) -> Tensor:
        return torch.tensor([running.root for running in self._running], device=self._device)

    def _choose_next(self, batch: Sequence[Running], logits: Tensor) -> list[int]:
        """The target's next token from logits [R, vocabulary]; -1 where they are no numbers."""
        roots = torch.zeros(len(batch), 1, dtype=torch.int64, device=self._device)
        choices = self._choose(batch, logits.unsqueeze(1), roots, roots, roots.unsqueeze(2) == 0)
        return [int(row) for row in choices.squeeze(1).tolist()]

    def _choose(
        self, batch: Sequence[Running], logits: Tensor, tokens: Tensor, depths: Tensor, seen: Tensor
    ) -> Tensor:
        """The target's token after each node: int64 [R, Q]; -1 for a request whose logits are no numbers.

        Args:
            batch: the requests.
            logits: [R, Q, vocabulary].
            tokens: int64 [R, Q], as are `depths`; `seen` is bool [R, Q, Q]: see `Sampler.choose`.
            depths: distance of each node from the root.
            seen: ancestors of each node.
        """
        if all(running.sampler.is_argmax for running in batch):
            choices = argmax(logits)
        else:
            choices = torch.stack(
                [
                    running.sampler.choose(logits[i], tokens[i], depths[i], seen[i], len(running.tokens) - 1)
                    for i, running in enumerate(batch)
                ]
            )
        finite = logits.gather(2, choices.unsqueeze(2)).isfinite().all(1)
        return torch.where(finite, choices, -1)

    def _accept(
        self, paths: list[list[int]], committed: list[list[int]], stats: list[RoundStats],
        captured: Tensor | None, rows: Rows,
    ) -> list[Output]:  # fmt: skip
        """Keep what was accepted: K/V rows, the drafter's context, tokens.

        Args:
            paths: accepted nodes of each request, root first.
            committed: its tokens, the bonus token last.
            stats: its verify step.
            captured: hidden states of all rows.
            rows: the verified rows.
        """
        self._extend_context(captured, rows, paths)
        self._compact(paths)
        for running, path in zip(self._running, paths, strict=True):
            running.length += len(path)
        return self._commit(0, committed, stats)

    def _extend_context(self, captured: Tensor | None, rows: Rows, paths: list[list[int]]) -> None:
        """Give the drafter the hidden states of newly committed rows.

        Args:
            captured: [R * Q, ...].
            rows: where those rows stand.
            paths: of each request, the rows that are committed, in order of position.
        """
        if captured is None:
            return
        drafter, cache = self._need_drafter()
        count = captured.shape[0] // rows.requests
        chosen = [i * count + node for i, path in enumerate(paths) for node in path]
        slots = [i * count + at for i, path in enumerate(paths) for at in range(len(path))]
        index = torch.tensor(chosen, device=self._device)
        drafter.extend_context(
            captured[index],
            rows.positions[index],
            rows.slots[torch.tensor(slots, device=self._device)],
            cache,
        )

    def _compact(self, paths: list[list[int]]) -> None:
        """Move the K/V rows of accepted nodes, which lie in tree order, to the positions they now have."""
        source, destination = [], []
        for slot, (running, path) in enumerate(zip(self._running, paths, strict=True)):
            start = slot * self._target_cache.capacity + running.length
            for depth, node in enumerate(path):
                if node != depth:
                    source.append(start + node)
                    destination.append(start + depth)
        if source:
            self._target_cache.move_rows(
                torch.tensor(source, device=self._device), torch.tensor(destination, device=self._device)
            )

    def _commit(
        self, first: int, committed: list[list[int]], stats: Sequence[RoundStats] | None = None
    ) -> list[Output]:
        """Append tokens to the requests from slot `first` on, and let those leave that ended."""
        outputs = []
        for i, tokens in enumerate(committed):
            running = self._running[first + i]
            if tokens[-1] < 0:
                _log.error("request %s: the model gave logits that are no numbers", running.request.rid)
                outputs.append(Output(running.request.rid, (), FinishReason.ABORT))
                continue
            outputs.append(running.commit(tokens, None if stats is None else stats[i]))
            self._stats.generated_tokens += len(outputs[-1].token_ids)
            if stats is not None:
                self._stats.rounds += 1
                self._stats.accepted_histogram[stats[i].accepted] += 1
        for i in reversed(range(len(outputs))):
            if outputs[i].finish is not None:
                self._leave(first + i, keep=outputs[i].finish is not FinishReason.ABORT)
        return outputs

    def _leave(self, slot: int, keep: bool = True) -> None:
        """Take a request out of the batch; its K/V goes to the prefix cache, the last slot into the gap."""
        running = self._running[slot]
        rows = min(running.length, len(running.tokens))
        if keep and self.config.prefix_cache_tokens:
            saved = tuple(cache.save(slot, rows) for cache in self._caches)
            self._prefixes.insert(
                running.request.extra_key, Prefix(np.array(running.tokens[:rows], dtype=np.int64), saved)
            )
        end = len(self._running) - 1
        if slot != end:
            for cache in self._caches:
                cache.move_slot(end, slot, self._running[end].length)
        self._running[slot] = self._running[end]
        self._running.pop()

    def _check(self, request: Request) -> None:
        """Refuse what cannot be served.

        Raises:
            ValueError: see `add`.
        """
        if any(running.request.rid == request.rid for running in [*self._running, *self._waiting]):
            raise ValueError(f"request id {request.rid!r} is in use")
        vocabulary = self.target.config.vocab_size
        if not request.input_ids:
            raise ValueError("the prompt has no tokens")
        if not all(0 <= token < vocabulary for token in request.input_ids):
            raise ValueError(f"the prompt holds token ids outside 0..{vocabulary - 1}")
        if len(request.input_ids) >= self.context_length:
            raise ValueError(
                f"the prompt has {len(request.input_ids)} tokens; with at least one of output it must fit "
                f"the context of {self.context_length}"
            )
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the checkpoint has none")
        check_sampling(request.sampling, vocabulary)
        if request.limits is not None:
            self._check_request_limits(request.limits)

    def _check_request_limits(self, limits: TreeLimits) -> None:
        if self.config.algorithm is not Algorithm.DDTREE:
            raise ValueError(
                f"tree limits need algorithm DDTREE; this engine decodes with {self.config.algorithm}"
            )
        for key in ("budget", "topk_cap"):
            asked, ours = getattr(limits, key), getattr(self.config.limits, key)
            if not 1 <= asked <= ours:
                raise ValueError(f"{key} {asked} is outside 1..{ours}, the server's own limit")

    def _need_drafter(self) -> tuple[DFlashDrafter, SlotCache]:
        if self.drafter is None or self._draft_cache is None:
            raise ValueError("plain decoding has no drafter")
        return self.drafter, self._draft_cache

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model_path} has no tokenizer.json; only token ids can be served")
        return self.tokenizer


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _load_tokenizer(directory: Path, vocabulary: int) -> Tokenizer | None:
    """The tokenizer beside the checkpoint; None if there is none.

    Raises:
        CheckpointError: it cannot be read, or knows more tokens than the model.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(path, f"is no tokenizer: {error}") from None
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocabulary:
        raise CheckpointError(path, f"has {size} tokens, but the model's vocabulary is {vocabulary}")
    return tokenizer


def _context_length(config: EngineConfig) -> int:
    longest = read_target_config(config.model_path).max_position_embeddings
    asked = longest if config.context_length is None else config.context_length
    if not 2 <= asked <= longest:
        raise ValueError(
            f"context_length {asked} is outside 2..{longest}, the model's max_position_embeddings"
        )
    return asked


def _load_drafter(config: EngineConfig, target: Qwen3Target) -> DFlashDrafter:
    if config.draft_model_path is None:
        raise ValueError(f"algorithm {config.algorithm} needs a draft model")
    return DFlashDrafter.load(config.draft_model_path, target, config.block_size)


def _check_limits(config: EngineConfig, block_size: int) -> None:
    if config.max_running_requests < 1:
        raise ValueError(f"max_running_requests {config.max_running_requests} is below 1")
    if config.algorithm is not Algorithm.DDTREE:
        return
    if config.limits.budget < block_size - 1:
        raise ValueError(
            f"tree budget {config.limits.budget} is below {block_size - 1}, the drafted tokens of a block of "
            f"{block_size}; the greedy chain would not fit"
        )
    if config.limits.topk_cap < 1:
        raise ValueError(f"top-k cap {config.limits.topk_cap} is below 1")


def _derived_seed(base: int, index: int) -> int:
    """The seed of the index-th request that brings none: distinct, and the same in every run."""
    digest = hashlib.sha256(f"{base}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _causal(count: int, device: torch.device) -> Tensor:
    return torch.ones(1, count, count, dtype=torch.bool, device=device).tril_()
