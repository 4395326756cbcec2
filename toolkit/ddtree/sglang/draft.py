"""The drafter's candidates: top-k tokens and log-probabilities of each slot, part of its CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.ddtree.kernels.topk import topk_logprobs


class DraftCandidates:
    """Borrows the target's head, as DFLASH does, and keeps the k best tokens of each slot instead of one.

    With tensor parallelism each rank ranks its shard of the vocabulary; the ranks' best and the logarithms of
    their sums of exponentials are gathered, so every rank holds the same candidates.

    Attributes:
        logprobs: float32 [most * S, K], static, written by each call.
        tokens: int64 [most * S, K], likewise.

    Args:
        weight: the head's rows of this rank, [rows, hidden]; only the first `shard` are used.
        shard: how many tokens of the vocabulary this rank has.
        first_token: id of the first of them.
        block_size: slots of a block, the bonus token's included.
        topk: K.
        most: the largest batch, in requests.
        group: SGLang's tensor-parallel group; None for one rank.
    """

    def __init__(
        self, weight: Tensor, shard: int, first_token: int, block_size: int, topk: int, most: int, group: Any
    ) -> None:
        self._weight = weight[:shard]
        self._first_token = first_token
        self._block_size = block_size
        self._topk = topk
        self._group = group
        rows = most * (block_size - 1)
        self.logprobs = torch.empty((rows, topk), dtype=torch.float32, device=weight.device)
        self.tokens = torch.empty((rows, topk), dtype=torch.int64, device=weight.device)

    def __call__(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> None:
        """Write the candidates of hidden states [R * block, hidden] into the static tensors."""
        del input_ids
        logprobs, tokens = self.compute(hidden_states)
        self.logprobs[: logprobs.shape[0]].copy_(logprobs)
        self.tokens[: tokens.shape[0]].copy_(tokens)

    def compute(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of slots 1 .. S of each block: float32 and int64 [R * S, K], contiguous."""
        width = hidden_states.shape[-1]
        slots = hidden_states.view(-1, self._block_size, width)[:, 1:].reshape(-1, width)
        logits = torch.matmul(slots.to(self._weight.dtype), self._weight.T)
        if self._group is None:
            return topk_logprobs(logits, self._topk)
        return self._gather(logits)

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
