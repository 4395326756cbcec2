"""What ends the drafter's forward, inside its CUDA graph: candidates of each slot, and trees of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from toolkit.ddtree.kernels.topk import topk_logprobs
from toolkit.ddtree.kernels.tree_builder import TreeLinks, build_trees
from toolkit.ddtree.transition import RankedChildren, TransitionTable
from toolkit.ddtree.tree import BatchLimits, DraftTrees
from toolkit.ddtree.types import TreeLimits

_Columns = TypeVar("_Columns", DraftTrees, TreeLinks, RankedChildren)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a draft gives; of a CUDA graph these are its own tensors, which its next replay overwrites.

    Attributes:
        trees: of each request.
        links: of the trees.
        tokens: int64 [R, S, K], the candidates that they were grown from.
        logprobs: float32 [R, S, K], the candidates' log-probabilities.
        children: the candidates re-scored for the policy `transition`, where the server offers it.
    """

    trees: DraftTrees
    links: TreeLinks
    tokens: Tensor
    logprobs: Tensor
    children: RankedChildren | None

    def first(self, requests: int) -> Draft:
        """That of the first requests."""
        trees, links = _first(self.trees, requests), _first(self.links, requests)
        children = None if self.children is None else _first(self.children, requests)
        return Draft(trees, links, self.tokens[:requests], self.logprobs[:requests], children)


class DraftCandidates:
    """Borrows the target's head, as DFLASH does, and keeps the k best tokens of each slot instead of one.

    With tensor parallelism each rank ranks its shard of the vocabulary; the ranks' best and the logarithms of
    their sums of exponentials are gathered, so every rank holds the same candidates.

    Args:
        weight: the head's rows of this rank, [rows, hidden]; only the first `shard` are used.
        shard: how many tokens of the vocabulary this rank has.
        first_token: id of the first of them.
        block_size: slots of a block, the bonus token's included.
        topk: K.
        group: SGLang's tensor-parallel group; None for one rank.
    """

    def __init__(
        self, weight: Tensor, shard: int, first_token: int, block_size: int, topk: int, group: Any
    ) -> None:
        self._weight = weight[:shard]
        self._first_token = first_token
        self._block_size = block_size
        self._topk = topk
        self._group = group

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of the slots behind the bonus token.

        Args:
            hidden_states: [R * block, hidden], the drafter's.

        Returns:
            log-probabilities float32 and tokens int64, both [R, S, K], contiguous.
        """
        width = hidden_states.shape[-1]
        slots = hidden_states.view(-1, self._block_size, width)[:, 1:].reshape(-1, width)
        logits = torch.matmul(slots.to(self._weight.dtype), self._weight.T)
        logprobs, tokens = topk_logprobs(logits, self._topk) if self._group is None else self._gather(logits)
        shape = (-1, self._block_size - 1, self._topk)
        return logprobs.view(shape), tokens.view(shape)

    def _gather(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        _, local = topk_logprobs(logits, self._topk)
        values = logits.gather(1, local).float()
        sums = torch.logsumexp(logits.float(), dim=1)
        ranks = self._group.world_size
        gathered_values = values.new_empty((ranks * values.shape[0], self._topk))
        gathered_tokens = local.new_empty((ranks * values.shape[0], self._topk))
        gathered_sums = sums.new_empty(ranks * values.shape[0])
        self._group.all_gather_into_tensor(gathered_values, values)
        self._group.all_gather_into_tensor(gathered_tokens, local + self._first_token)
        self._group.all_gather_into_tensor(gathered_sums, sums)
        shape = (ranks, values.shape[0], self._topk)
        return merge_shards(
            gathered_values.view(shape), gathered_tokens.view(shape), gathered_sums.view(shape[:2])
        )


class TreeDrafter:
    """The end of the drafter's forward: candidates, and a tree of them for each request.

    Within a CUDA graph it reads the limits of requests from tensors that stay where they are, and leaves its
    trees in tensors of that graph. Outside of one it is an ordinary function.

    Args:
        candidates: of the drafter's hidden states.
        block_size: slots of a block, the bonus token's included.
        own: the server's limits; its budget fixes the shapes.
        most: the largest batch of a graph, in requests.
        device: where the drafter is.
        transition: re-scores candidates for the policy `transition`; None where no request may ask for it.
    """

    def __init__(
        self, candidates: DraftCandidates, block_size: int, own: TreeLimits, most: int, device: Any,
        transition: TransitionTable | None = None,
    ) -> None:  # fmt: skip
        self._candidates = candidates
        self._block_size = block_size
        self._own = own
        self._transition = transition
        self._device = torch.device(device)
        self._static = self._upload((own,) * most)
        self._static_holds = (own,) * most
        self._captured: dict[int, Draft] = {}
        self._uploaded = lru_cache(maxsize=256)(self._upload)

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        """Part of the graph's capture: hidden states [R * block, hidden], tokens int64 [R * block]."""
        requests = hidden_states.shape[0] // self._block_size
        roots = input_ids.view(requests, self._block_size)[:, 0].contiguous()
        self._captured[requests] = self._grow(hidden_states, roots, self._static[:, :requests])

    def prepare(self, limits: tuple[TreeLimits, ...]) -> None:
        """Set the limits that the next replay reads; does nothing where they are there already."""
        count = len(limits)
        if count <= len(self._static_holds) and self._static_holds[:count] != limits:
            self._static[:, :count].copy_(self._uploaded(limits))
            self._static_holds = limits + self._static_holds[count:]

    def replayed(self, padded: int, requests: int) -> Draft:
        """The draft of the first `requests` of a replay padded to `padded` requests."""
        draft = self._captured[padded]
        return draft if padded == requests else draft.first(requests)

    def grow(self, hidden_states: Tensor, roots: Tensor, limits: tuple[TreeLimits, ...]) -> Draft:
        """A draft without a graph.

        Args:
            hidden_states: [R * block, hidden], the drafter's.
            roots: int64 [R], bonus tokens.
            limits: of each request.
        """
        return self._grow(hidden_states, roots.contiguous(), self._uploaded(limits))

    def _grow(self, hidden_states: Tensor, roots: Tensor, limits: Tensor) -> Draft:
        logprobs, tokens = self._candidates(hidden_states)
        batch = BatchLimits(*limits.unbind(0))
        children = None
        if self._transition is not None:
            children = self._transition.rank_children(logprobs, tokens, roots, batch.topk_cap)
        trees, links = build_trees(logprobs, tokens, roots, batch, self._own.budget, children)
        return Draft(trees, links, tokens, logprobs, children)

    def _upload(self, limits: tuple[TreeLimits, ...]) -> Tensor:
        """Limits on the device, int32 [3, R]; a copy from pinned memory does not wait."""
        host = BatchLimits.of(limits)
        packed = torch.stack([host.budget, host.topk_cap, host.expansion])
        if self._device.type == "cpu":
            return packed
        return packed.pin_memory().to(self._device, non_blocking=True)


def _first(value: _Columns, requests: int) -> _Columns:
    """The first requests of a dataclass of tensors [R, ...]."""
    columns: dict[str, Any] = {}
    for field in fields(value):
        column = getattr(value, field.name)
        columns[field.name] = column[:requests] if isinstance(column, Tensor) else column
    return replace(value, **columns)


def merge_shards(values: Tensor, tokens: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The K best of the vocabulary from the K best of each of P shards, and their log-probabilities.

    Equal logits go by token id, lowest first: shards come in the order of their tokens, the sort is stable.

    Args:
        values: float32 [P, rows, K], logits, falling in each shard.
        tokens: int64 [P, rows, K].
        sums: float32 [P, rows], log of the sum of exponentials of each shard's logits.

    Returns:
        float32 and int64 [rows, K].
    """
    topk = values.shape[2]
    flat_values = values.transpose(0, 1).flatten(1)
    flat_tokens = tokens.transpose(0, 1).flatten(1)
    best, order = flat_values.sort(dim=1, descending=True, stable=True)
    total = torch.logsumexp(sums, dim=0).unsqueeze(1)
    logprobs = (best[:, :topk] - total).clamp(max=0.0)
    return logprobs.contiguous(), flat_tokens.gather(1, order[:, :topk])
