"""Frequency, presence and repetition penalties and `min_new_tokens`, exact at every node of a tree.

A penalty depends on the tokens before a node: those that the request has output, and those on the node's
path. SGLang's own counters follow the scheduler, which under overlap knows a step's tokens one step late; so
the tokens are counted here, on the device, where they are committed. As in SGLang only output tokens count,
never the prompt's, and the order is: frequency and presence, then repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from toolkit.ddtree.kernels.penalties import PenaltyTable, count_tokens, penalise
from toolkit.ddtree.sglang.kernels import Commit
from toolkit.ddtree.tree import DraftTrees

_FIRST_ROWS = 4
_NO_TOKEN = -1


def asks(req: Any) -> bool:
    """Whether a request has penalties or a least length."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def stop_tokens(req: Any) -> set[int]:
    """Tokens that end a request by themselves, which `min_new_tokens` holds back."""
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
        found |= {req.tokenizer.eos_token_id} - {None}
    return found


class Penalties:
    """Output tokens of the requests that ask for penalties, one row each, kept on the device.

    A request keeps its row by its place in SGLang's request pool, which a later request can only get with a
    prefill of its own; that starts the row anew.

    Args:
        vocabulary: logits a row.
        device: where the logits are.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self._device = device
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._table = PenaltyTable(
            counts=torch.empty((0, vocabulary), dtype=torch.int32, device=device),
            settings=torch.empty((0, 3), dtype=torch.float32, device=device),
            lengths=torch.empty((0, 2), dtype=torch.int32, device=device),
            stops=torch.empty((0, 1), dtype=torch.int32, device=device),
        )
        self._uploaded = lru_cache(maxsize=256)(self._upload)

    def begin(self, reqs: Sequence[Any], first_tokens: Tensor) -> None:
        """Take note of requests that were prefilled, those that were retracted before among them.

        Args:
            reqs: SGLang's requests of the batch.
            first_tokens: int [R], what the prefill chose; not in `output_ids` yet.
        """
        for index, req in enumerate(reqs):
            if not asks(req):
                row = self._rows.pop(req.req_pool_idx, None)
                self._free += [] if row is None else [row]
                continue
            row = self._row(req.req_pool_idx)
            params = req.sampling_params
            output = list(req.output_ids)
            settings = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
            table = self._table
            table.settings[row] = self._put(settings, torch.float32)
            table.lengths[row] = self._put((len(output) + 1, params.min_new_tokens), torch.int32)
            self._hold_back(row, sorted(stop_tokens(req)) if params.min_new_tokens else [])
            first = first_tokens[index : index + 1].to(torch.int64)
            tokens = torch.cat([self._put(output, torch.int64), first])
            ones = torch.ones_like(tokens, dtype=torch.int32)
            table.counts[row].zero_().index_add_(0, tokens, ones)

    def apply(self, logits: Tensor, reqs: Sequence[Any], trees: DraftTrees) -> None:
        """Change the logits of the nodes of requests that ask for it. No synchronisation with the host.

        Args:
            logits: [R * W, vocabulary], contiguous.
            reqs: SGLang's requests of the batch.
            trees: the trees that were verified; the root is an output token already.
        """
        rows = self._rows_of(reqs)
        if rows is not None:
            penalise(logits, rows, self._table, trees)

    def commit(self, reqs: Sequence[Any], commit: Commit) -> None:
        """Count what a step committed."""
        rows = self._rows_of(reqs)
        if rows is not None:
            count_tokens(rows, commit.tokens, commit.lengths, self._table)

    def _rows_of(self, reqs: Sequence[Any]) -> Tensor | None:
        """Rows of a batch, int32 [R], -1 for requests without penalties; None where none has any."""
        if not self._rows:
            return None
        rows = tuple(self._rows[req.req_pool_idx] if asks(req) else _NO_TOKEN for req in reqs)
        return None if max(rows) < 0 else self._uploaded(rows)

    def _row(self, place: int) -> int:
        if place not in self._rows:
            if not self._free:
                self._grow()
            self._rows[place] = self._free.pop()
        return self._rows[place]

    def _grow(self) -> None:
        table = self._table
        old = table.counts.shape[0]
        more = max(old, _FIRST_ROWS)
        grown = (torch.cat([part, part.new_zeros((more, part.shape[1]))]) for part in _parts(table))
        self._table = PenaltyTable(*grown)
        self._free += range(old, old + more)

    def _hold_back(self, row: int, tokens: list[int]) -> None:
        """Set the stop tokens of a row, padded with -1."""
        table = self._table
        missing = len(tokens) - table.stops.shape[1]
        if missing > 0:
            table.stops = torch.nn.functional.pad(table.stops, (0, missing), value=_NO_TOKEN)
        padding = [_NO_TOKEN] * (table.stops.shape[1] - len(tokens))
        table.stops[row] = self._put([*tokens, *padding], torch.int32)

    def _upload(self, rows: tuple[int, ...]) -> Tensor:
        return self._put(rows, torch.int32)

    def _put(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Values on the device; a copy from pinned memory does not wait."""
        host = torch.tensor(values, dtype=dtype)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)


def _parts(table: PenaltyTable) -> tuple[Tensor, ...]:
    return table.counts, table.settings, table.lengths, table.stops


def restore(info: Any, reqs: Sequence[Any]) -> None:
    """Complete SGLang's penalties of a prefill's sampled token, in place.

    SGLang starts a request anew when it was retracted, without the tokens that it has output, and does not
    hold back the end tokens of the model's generation config.

    Args:
        info: SGLang's `SamplingBatchInfo` for one forward.
        reqs: its requests.
    """
    for index, req in enumerate(reqs):
        if not asks(req):
            continue
        params, output = req.sampling_params, torch.tensor(list(req.output_ids), dtype=torch.int64)
        additive, scaling = info.acc_additive_penalties, info.acc_scaling_penalties
        if params.min_new_tokens:
            held = torch.tensor(sorted(stop_tokens(req)), dtype=torch.int64).to(additive.device)
            additive[index, held] = float("-inf") if len(output) < params.min_new_tokens else 0.0
        seen, counts = (part.to(additive.device) for part in torch.unique(output, return_counts=True))
        additive[index, seen] -= params.frequency_penalty * counts + params.presence_penalty
        if params.repetition_penalty != 1.0:
            scaling[index, seen] = params.repetition_penalty
