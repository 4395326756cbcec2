"""Target and drafter over the K/V slots of one batch: lays out rows, runs forwards, moves K/V."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.ddtree.cache import SlotCache
from toolkit.ddtree.models.config import read_target_config
from toolkit.ddtree.models.dflash import DFlashDrafter
from toolkit.ddtree.models.layers import Rows, attention_mask
from toolkit.ddtree.models.qwen3 import Qwen3Target
from toolkit.ddtree.transition import RankedChildren
from toolkit.ddtree.tree import BatchLimits, DraftTrees, grow_trees, topk_logprobs
from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, TreeLimits
from toolkit.ddtree.validation import check_config, check_context

PREFILL_ROWS = 1024
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Kernels:
    """The Triton kernels, imported only where they run."""

    def __init__(self) -> None:
        from toolkit.ddtree.kernels.topk import topk_logprobs
        from toolkit.ddtree.kernels.tree_builder import build_trees

        self.topk_logprobs = topk_logprobs
        self.build_trees = build_trees


class ModelRunner:
    """The models of one engine and their K/V.

    Attributes:
        target: the target.
        drafter: the drafter; None for plain decoding.
        block_size: slots of a draft block; 1 without a drafter.
        context_length: longest prompt + output.
        device: where everything is.

    Args:
        config: what to load.

    Raises:
        CheckpointError: a checkpoint cannot be served.
        ValueError: the config does not fit the models.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.dtype not in _DTYPES:
            raise ValueError(f"dtype {config.dtype!r} is not one of {', '.join(_DTYPES)}")
        self.device = torch.device(config.device)
        longest = read_target_config(config.model_path).max_position_embeddings
        check_context(config, longest)
        self.context_length = longest if config.context_length is None else config.context_length
        self.target = Qwen3Target.load(
            config.model_path, self.context_length + PREFILL_ROWS, _DTYPES[config.dtype], self.device
        )
        self.drafter: DFlashDrafter | None = None
        self.block_size = 1
        if config.algorithm is not Algorithm.NONE:
            if config.draft_model_path is None:
                raise ValueError(f"algorithm {config.algorithm} needs a draft model")
            self.drafter = DFlashDrafter.load(config.draft_model_path, self.target, config.block_size)
            self.block_size = self.drafter.block_size
        check_config(config, self.block_size, self.has_table)
        self._block_offsets = torch.arange(self.block_size, device=self.device)
        self._kernels = _Kernels() if self.device.type == "cuda" else None
        self._start_empty()

    @property
    def has_table(self) -> bool:
        """Whether the drafter has a transition table."""
        return self.drafter is not None and self.drafter.transition is not None

    def twin(self) -> ModelRunner:
        """The same models with K/V of its own."""
        twin = copy.copy(self)
        twin._start_empty()
        return twin

    def rows(self, first: int, lengths: Sequence[int], offsets: Tensor, seen: Tensor | None) -> Rows:
        """New rows of requests, standing behind their committed ones.

        Args:
            first: slot of the first request; the others follow.
            lengths: committed rows of each request.
            offsets: int64 [R, Q], position of each new row behind the committed ones.
            seen: bool [R or 1, Q, Q], which new row sees which; None: all see all.
        """
        requests, count = len(lengths), offsets.shape[1]
        visible = max(lengths) + count
        self.reserve(first + requests, visible)
        for slot, length in enumerate(lengths, first):
            self._written[slot] = max(self._written[slot], length + count)
        capacity = self._target_cache.capacity
        mask = None
        if requests == 1:
            positions = offsets[0] + lengths[0]
            start = first * capacity + lengths[0]
            slots = torch.arange(start, start + count, device=self.device)
            if seen is not None:
                mask = attention_mask(positions[:1], seen, visible, self.target.embedding.dtype)
        else:
            starts = torch.tensor(lengths, device=self.device)
            positions = (starts[:, None] + offsets).flatten()
            bases = torch.arange(first, first + requests, device=self.device) * capacity + starts
            slots = (bases[:, None] + torch.arange(count, device=self.device)).flatten()
            if seen is None:
                seen = torch.ones(1, count, count, dtype=torch.bool, device=self.device)
            mask = attention_mask(starts, seen, visible, self.target.embedding.dtype)
        return Rows(positions, slots, first, requests, visible, mask)

    def forward(self, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Run tokens int64 [R, Q] through the target.

        Returns:
            Last hidden states [R * Q, hidden], and [R * Q, layers * hidden] for the drafter, if there is one.
        """
        capture = () if self.drafter is None else self.drafter.config.target_layer_ids
        return self.target.forward(tokens.flatten(), rows, self._target_cache, capture)

    def append(self, tokens: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Run tokens of one request in slot 0, behind its first `start` rows; see `forward`."""
        count = len(tokens)
        offsets = torch.arange(count, device=self.device)[None]
        causal = torch.ones(1, count, count, dtype=torch.bool, device=self.device).tril_()
        rows = self.rows(0, [start], offsets, causal)
        hidden, captured = self.forward(torch.tensor([list(tokens)], device=self.device), rows)
        self.extend_context(captured, rows, [range(count)])
        return hidden, captured

    def draft(self, roots: Tensor, lengths: Sequence[int]) -> Tensor:
        """Draft the requests of the slots 0 .. R - 1.

        Args:
            roots: int64 [R], the bonus tokens.
            lengths: committed rows of each.

        Returns:
            Logits [R, block_size - 1, vocabulary].
        """
        drafter, cache = self._drafting()
        offsets = self._block_offsets.expand(len(lengths), -1)
        return drafter.draft(drafter.block(roots), self.rows(0, lengths, offsets, None), cache)

    def grow(
        self, draft_logits: Tensor, roots: Tensor, limits: Sequence[TreeLimits]
    ) -> tuple[DraftTrees, Tensor]:
        """Build a tree from each request's draft, by kernels on a GPU and by their plain references on a CPU.

        Args:
            draft_logits: [R, block_size - 1, vocabulary].
            roots: int64 [R], the bonus tokens.
            limits: limits of each tree.

        Returns:
            The trees, and the drafter's candidates int64 [R, block_size - 1, largest cap].
        """
        cap = min(max(limit.topk_cap for limit in limits), draft_logits.shape[-1])
        budget = max(limit.budget for limit in limits)
        if self._kernels is None:
            logprobs, candidates = topk_logprobs(draft_logits, cap)
            children = self._rank_children(logprobs, candidates, roots, limits)
            return grow_trees(logprobs, candidates, roots, limits, budget, children), candidates
        logprobs, candidates = self._kernels.topk_logprobs(draft_logits, cap)
        children = self._rank_children(logprobs, candidates, roots, limits)
        batch = BatchLimits.of(limits, self.device)
        trees, _ = self._kernels.build_trees(logprobs, candidates, roots, batch, budget, children)
        return trees, candidates

    def _rank_children(
        self, logprobs: Tensor, candidates: Tensor, roots: Tensor, limits: Sequence[TreeLimits]
    ) -> RankedChildren | None:
        """Candidates re-scored by the ones before them, if a request's policy asks for it."""
        table = None if self.drafter is None else self.drafter.transition
        if table is None or all(limit.expansion is not Expansion.TRANSITION for limit in limits):
            return None
        caps = torch.tensor([limit.topk_cap for limit in limits], device=self.device)
        return table.rank_children(logprobs, candidates, roots, caps)

    def extend_context(self, captured: Tensor | None, rows: Rows, paths: Sequence[Sequence[int]]) -> None:
        """Give the drafter the hidden states of newly committed rows.

        Args:
            captured: hidden states of all rows, see `forward`; None does nothing.
            rows: where those rows stand.
            paths: which of each request's rows are committed, in order of position, without gaps.
        """
        if captured is None:
            return
        drafter, cache = self._drafting()
        count = captured.shape[0] // rows.requests
        nodes = [i * count + node for i, path in enumerate(paths) for node in path]
        places = [i * count + depth for i, path in enumerate(paths) for depth in range(len(path))]
        index, place = torch.tensor([nodes, places], device=self.device)
        positions, slots = rows.positions.index_select(0, index), rows.slots.index_select(0, place)
        drafter.extend_context(captured.index_select(0, index), positions, slots, cache)

    def compact(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the K/V of accepted nodes, which lie in tree order, to the positions that they now have.

        Args:
            lengths: committed rows of the requests of the slots 0 .. R - 1, before this round.
            paths: accepted nodes of each, root first.
        """
        source: list[int] = []
        destination: list[int] = []
        for slot, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            start = slot * self._target_cache.capacity + length
            source += [start + node for depth, node in enumerate(path) if node != depth]
            destination += [start + depth for depth, node in enumerate(path) if node != depth]
        if source:
            self._target_cache.move_rows(
                torch.tensor(source, device=self.device), torch.tensor(destination, device=self.device)
            )

    def reserve(self, slots: int, rows: int) -> None:
        """Make room in all caches alike, so that a row has the same number in each."""
        for cache in self._caches:
            cache.reserve(slots, rows)
        self._written += [0] * (slots - len(self._written))

    def save(self, slot: int, rows: int) -> tuple[Tensor, ...]:
        """Copies of the first rows of a slot, one a cache."""
        return tuple(cache.save(slot, rows) for cache in self._caches)

    def restore(self, slot: int, saved: Sequence[Tensor], rows: int) -> None:
        """Write the first of saved rows to a slot."""
        self.reserve(slot + 1, rows)
        self._written[slot] = max(self._written[slot], rows)
        for cache, stored in zip(self._caches, saved, strict=True):
            cache.restore(slot, stored[:, :rows])

    def release(self, slot: int, last: int, rows: int) -> None:
        """Free a slot: the last one's rows move into it, and the last one is cleared.

        A free slot holds zeros: what a request left behind, perhaps no numbers, must not reach another
        through masked rows, since NaN times zero is NaN.

        Args:
            slot: the slot to free.
            last: the last slot in use.
            rows: committed rows of the last slot.
        """
        for cache in self._caches:
            cache.clear(slot, self._written[slot])
            if slot != last:
                cache.move_slot(last, slot, rows)
                cache.clear(last, self._written[last])
        self._written[slot] = rows
        self._written[last] = 0

    def _start_empty(self) -> None:
        self._written: list[int] = []  # rows of each slot that may hold something else than zeros
        self._target_cache = self.target.new_cache()
        self._caches = [self._target_cache]
        if self.drafter is not None:
            self._caches.append(self.drafter.new_cache())

    def _drafting(self) -> tuple[DFlashDrafter, SlotCache]:
        if self.drafter is None:
            raise ValueError("plain decoding has no drafter")
        return self.drafter, self._caches[1]
