"""The embedded engine: one batch of requests, decoded round by round, plainly or speculatively.

A request that runs has `length` committed K/V rows and one token more: its last one, the root of the next
round, whose row that round writes. Requests join between rounds by a prefill, which samples their first
token, and leave when they end. One thread drives an engine.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from toolkit.ddtree.cache import Prefix, PrefixCache
from toolkit.ddtree.model_runner import PREFILL_ROWS, ModelRunner
from toolkit.ddtree.models.layers import Rows
from toolkit.ddtree.running import Running
from toolkit.ddtree.sampling import Sampler, argmax, only_numbers
from toolkit.ddtree.stopping import StopStrings
from toolkit.ddtree.tokenizer import load_tokenizer
from toolkit.ddtree.tree import DraftTrees, ancestor_mask
from toolkit.ddtree.types import Algorithm, EngineConfig, FinishReason, Output, Request, RoundStats
from toolkit.ddtree.validation import check_request
from toolkit.ddtree.walk import round_stats, walk

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineStats:
    """How the engine stands, and counters since it started.

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

    Attributes:
        config: how it was built.
        models: the models and their K/V.
        tokenizer: the target's; None if its checkpoint has none.

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
        self.models = ModelRunner(config)
        self.tokenizer = load_tokenizer(config.model_path, self.models.target.config.vocab_size)
        self._device = self.models.device
        self._prefixes = PrefixCache(config.prefix_cache_tokens)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._ended: list[Output] = []
        self._stats = EngineStats(accepted_histogram=[0] * self.block_size)
        self._unseeded = 0

    @property
    def block_size(self) -> int:
        """Slots of a draft block, the bonus token's included; 1 when decoding plainly."""
        return self.models.block_size

    @property
    def context_length(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.models.context_length

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
        """Facts about the models."""
        target, drafter = self.models.target.config, self.config.draft_model_path
        return {
            "model_path": str(self.config.model_path),
            "draft_model_path": None if drafter is None else str(drafter),
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

    def check(self, request: Request) -> None:
        """Check a request, from any thread: it reads what never changes.

        Raises:
            ValueError: the request cannot be served as asked; the message says why.
        """
        vocabulary = self.models.target.config.vocab_size
        check_request(request, self.config, vocabulary, self.context_length, self.models.has_table)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the request cannot be served as asked; the message says why.
        """
        self.check(request)
        target = self.models.target.config
        if any(other.request.rid == request.rid for other in (*self._running, *self._waiting)):
            raise ValueError(f"request id {request.rid!r} is in use")
        sampling = request.sampling
        if sampling.stop:
            self._need_tokenizer()
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else target.eos_token_ids)
        seed = self._fresh_seed() if sampling.sampling_seed is None else sampling.sampling_seed
        self._waiting.append(
            Running(
                request=request,
                sampler=Sampler(sampling, seed, stop_ids, request.input_ids, target.vocab_size, self._device),
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
                self._leave(slot, keep=False)
                self._ended.append(Output(rid, (), FinishReason.ABORT))
                return

    def flush_cache(self) -> None:
        """Forget all prefixes."""
        self._prefixes.clear()

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Do the next piece of work: the prefill of requests that can join, else one round.

        What goes wrong for one request alone, such as logits that are no numbers, ends it with
        `FinishReason.ABORT`. An exception concerns the whole batch: abort its requests and flush the cache
        before the next step.

        Returns:
            What requests gained, or how they ended.
        """
        outputs, self._ended = self._ended, []
        joined = self._join()
        if joined:
            return outputs + self._prefill(joined)
        if self._running:
            return outputs + self._round()
        return outputs

    def twin(self) -> Engine:
        """An idle engine on the same weights, with caches of its own: it leaves no trace here."""
        twin = copy.copy(self)
        twin.models = self.models.twin()
        twin._prefixes = PrefixCache(0)
        twin._waiting, twin._running, twin._ended = deque(), [], []
        twin._stats = EngineStats(accepted_histogram=[0] * self.block_size)
        return twin

    def _join(self) -> int:
        """Move waiting requests into the batch, with what the prefix cache has of them; how many."""
        room = min(self.config.max_running_requests - len(self._running), len(self._waiting))
        for _ in range(room):
            running = self._waiting.popleft()
            count, saved = self._prefixes.longest(running.request.extra_key, running.tokens[:-1])
            if count:
                self.models.restore(len(self._running), saved, count)
            running.length = running.cached_tokens = count
            self._running.append(running)
        return room

    def _prefill(self, joined: int) -> list[Output]:
        """Run the prompts of the last `joined` requests, padded, in pieces; sample a token for each."""
        first = len(self._running) - joined
        batch = self._running[first:]
        last: dict[int, Tensor] = {}
        while any(running.pending for running in batch):
            counts = [min(running.pending, max(1, PREFILL_ROWS // joined)) for running in batch]
            width = max(counts)
            padded = [
                running.tokens[running.length : running.length + count] + [0] * (width - count)
                for running, count in zip(batch, counts, strict=True)
            ]
            offsets = torch.arange(width, device=self._device).expand(joined, -1)
            rows = self.models.rows(first, _lengths(batch), offsets, _causal(width, self._device))
            hidden, captured = self.models.forward(torch.tensor(padded, device=self._device), rows)
            self.models.extend_context(captured, rows, [range(count) for count in counts])
            for i, (running, count) in enumerate(zip(batch, counts, strict=True)):
                running.length += count
                if count and not running.pending:
                    last[i] = hidden[i * width + count - 1]
        chosen = self._choose_next(batch, torch.stack([last[i] for i in range(joined)]))
        return self._commit(first, [[token] for token in chosen])

    def _round(self) -> list[Output]:
        if self.config.algorithm is Algorithm.NONE:
            return self._plain_round()
        if self.config.algorithm is Algorithm.DFLASH:
            return self._linear_round()
        return self._tree_round()

    def _plain_round(self) -> list[Output]:
        """One token for each request."""
        roots = self._roots().unsqueeze(1)
        rows = self.models.rows(0, _lengths(self._running), torch.zeros_like(roots), None)
        hidden, _ = self.models.forward(roots, rows)
        for running in self._running:
            running.length += 1
        return self._commit(0, [[token] for token in self._choose_next(self._running, hidden)])

    def _linear_round(self) -> list[Output]:
        """Verify the greedy chain of each request's block: DFlash without a tree."""
        lengths = _lengths(self._running)
        roots = self._roots()
        drafted = argmax(self.models.draft(roots, lengths))
        tokens = torch.cat([roots.unsqueeze(1), drafted], dim=1)
        width = tokens.shape[1]
        depths = torch.arange(width, device=self._device).expand_as(tokens)
        causal = _causal(width, self._device)
        rows = self.models.rows(0, lengths, depths, causal)
        hidden, captured = self.models.forward(tokens, rows)
        choices = self._choose(self._running, hidden, tokens, depths, causal.expand(len(lengths), -1, -1))
        accepted = (choices[:, :-1] == drafted).cumprod(1).sum(1).tolist()
        committed = [row[: count + 1] for row, count in zip(choices.tolist(), accepted, strict=True)]
        stats = [_chain_stats(width - 1, count) for count in accepted]
        return self._accept([range(count + 1) for count in accepted], committed, stats, captured, rows)

    def _tree_round(self) -> list[Output]:
        """Draft, grow the trees, verify them in one forward, walk, commit."""
        lengths = _lengths(self._running)
        limits = [running.limits for running in self._running]
        roots = self._roots()
        trees, candidates = self.models.grow(self.models.draft(roots, lengths), roots, limits)
        seen, rows, hidden, captured = self._verify(trees, lengths)
        choices = self._choose(self._running, hidden, trees.tokens, trees.depths, seen)
        walked = walk(trees, choices)
        stats = round_stats(trees, walked, candidates)
        paths = [path[: row.committed] for path, row in zip(walked.path.tolist(), stats, strict=True)]
        committed = [
            [row[node] for node in path] for row, path in zip(choices.tolist(), paths, strict=True)
        ]  # what the target chose at each accepted node is the node after it, or the bonus token
        return self._accept(paths, committed, stats, captured, rows)

    def _verify(
        self, trees: DraftTrees, lengths: Sequence[int]
    ) -> tuple[Tensor, Rows, Tensor, Tensor | None]:
        """Run trees through the target, behind the committed rows of slots 0 .. R - 1.

        Returns:
            Who saw whom [R, N+1, N+1], where the rows stand, and what `ModelRunner.forward` gives.
        """
        seen = ancestor_mask(trees)
        rows = self.models.rows(0, lengths, trees.depths, seen)
        return seen, rows, *self.models.forward(trees.tokens, rows)

    def _roots(self) -> Tensor:
        return torch.tensor([running.root for running in self._running], device=self._device)

    def _choose_next(self, batch: Sequence[Running], hidden: Tensor) -> list[int]:
        """The target's next token after hidden states [R, hidden]; -1 where logits are no numbers."""
        roots = torch.zeros(len(batch), 1, dtype=torch.int64, device=self._device)
        choices = self._choose(batch, hidden, roots, roots, roots.unsqueeze(2) == 0)
        return [int(token) for token in choices.squeeze(1).tolist()]

    def _choose(
        self, batch: Sequence[Running], hidden: Tensor, tokens: Tensor, depths: Tensor, seen: Tensor
    ) -> Tensor:
        """The target's token after each node: int64 [R, Q]; -1 for a request whose logits are no numbers.

        Args:
            batch: the requests.
            hidden: last hidden states [R * Q, hidden].
            tokens: int64 [R, Q], tokens of the nodes.
            depths: int64 [R, Q], their distances from the root.
            seen: bool [R, Q, Q], their ancestors.
        """
        logits = self.models.target.logits(hidden).view(*tokens.shape, -1)
        if all(running.sampler.is_argmax for running in batch):
            choices = argmax(logits)
        else:
            choices = torch.stack(
                [
                    running.sampler.choose(logits[i], tokens[i], depths[i], seen[i], len(running.tokens) - 1)
                    for i, running in enumerate(batch)
                ]
            )
        return only_numbers(logits, choices)

    def _accept(
        self, paths: Sequence[Sequence[int]], committed: list[list[int]], stats: list[RoundStats],
        captured: Tensor | None, rows: Rows,
    ) -> list[Output]:  # fmt: skip
        """Keep what was accepted: hidden states for the drafter, K/V rows, tokens.

        Args:
            paths: accepted nodes of each request, root first.
            committed: its tokens, the bonus token last.
            stats: its verify step.
            captured: hidden states of the verified rows.
            rows: where those rows stand.
        """
        self.models.extend_context(captured, rows, paths)
        self._compact(paths)
        for running, path in zip(self._running, paths, strict=True):
            running.length += len(path)
        return self._commit(0, committed, stats)

    def _compact(self, paths: Sequence[Sequence[int]]) -> None:
        self.models.compact(_lengths(self._running), paths)

    def _commit(
        self, first: int, committed: list[list[int]], stats: Sequence[RoundStats] | None = None
    ) -> list[Output]:
        """Append tokens to the requests from slot `first` on, and let those leave that ended."""
        outputs = []
        for i, tokens in enumerate(committed):
            running = self._running[first + i]
            if tokens[-1] < 0:
                _log.error("request %s: the model's logits are no numbers", running.request.rid)
                outputs.append(Output(running.request.rid, (), FinishReason.ABORT))
                continue
            output = running.commit(tokens, None if stats is None else stats[i])
            outputs.append(output)
            self._stats.generated_tokens += len(output.token_ids)
            if stats is not None:
                self._stats.rounds += 1
                self._stats.accepted_histogram[stats[i].accepted] += 1
        for i in reversed(range(len(outputs))):
            if outputs[i].finish is not None:
                self._leave(first + i, keep=outputs[i].finish is not FinishReason.ABORT)
        return outputs

    def _leave(self, slot: int, *, keep: bool) -> None:
        """Take a request out of the batch; its K/V goes to the prefix cache, the last request to its slot."""
        running = self._running[slot]
        rows = min(running.length, len(running.tokens))
        if keep and self.config.prefix_cache_tokens:
            tokens = np.array(running.tokens[:rows], dtype=np.int64)
            self._prefixes.insert(running.request.extra_key, Prefix(tokens, self.models.save(slot, rows)))
        last = len(self._running) - 1
        self.models.release(slot, last, self._running[last].length)
        self._running[slot] = self._running[last]
        self._running.pop()

    def _fresh_seed(self) -> int:
        """The seed of the next request that brings none: the same in every run of the server."""
        text = f"{self.config.random_seed}:{self._unseeded}"
        self._unseeded += 1
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model_path} has no tokenizer; only token ids can be served")
        return self.tokenizer


def _lengths(batch: Sequence[Running]) -> list[int]:
    return [running.length for running in batch]


def _chain_stats(drafted: int, accepted: int) -> RoundStats:
    return RoundStats(
        nodes=drafted,
        depth=drafted,
        accepted=accepted,
        committed=accepted + 1,
        chain_in_tree=True,
        ranks=(0,) * accepted,
        reject_rank=None if accepted == drafted else -1,
    )


def _causal(count: int, device: torch.device) -> Tensor:
    return torch.ones(1, count, count, dtype=torch.bool, device=device).tril_()
