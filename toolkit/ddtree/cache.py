"""K/V of the running requests, and of past ones whose prefixes may come again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ROWS = 256  # capacity grows in these steps
_Ids = npt.NDArray[np.int64]


class SlotCache:
    """K/V rows of running requests: request i owns slot i, and its position p is row p of the slot.

    Grows with what is asked of it, so that a server sized for many long requests starts small.

    Attributes:
        rows: K/V of each layer over all slots, [slots * capacity, 2 * kv heads, dim], keys first.

    Args:
        layers: layers of the model.
        kv_heads: key/value heads of a layer.
        dim: size of a head.
        dtype: dtype of K/V.
        device: where they are.
    """

    def __init__(
        self, layers: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kv_heads = kv_heads
        self._adopt(torch.zeros(layers, 0, 0, 2 * kv_heads, dim, dtype=dtype, device=device))

    @property
    def capacity(self) -> int:
        """Rows of each slot."""
        return self._data.shape[2]

    def visible(self, first: int, count: int, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first rows of some slots: two [count, kv heads, rows, dim] a layer."""
        seen = self._data[:, first : first + count, :rows].transpose(2, 3)
        keys, values = seen[:, :, : self._kv_heads], seen[:, :, self._kv_heads :]
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def reserve(self, slots: int, rows: int) -> None:
        """Make room for `rows` rows in each of `slots` slots; what is stored stays."""
        layers, have_slots, have_rows, *row_shape = self._data.shape
        if slots <= have_slots and rows <= have_rows:
            return
        rows = max(have_rows, -(-rows // _ROWS) * _ROWS)
        grown = self._data.new_zeros(layers, max(slots, have_slots), rows, *row_shape)
        grown[:, :have_slots, :have_rows] = self._data
        self._adopt(grown)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows [n, layers, 2 * kv heads, dim] of all layers, int64 [n] counted over all slots."""
        self._data.flatten(1, 2).index_copy_(1, slots, rows.transpose(0, 1))

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """Copy rows of all layers, int64 [n] counted over all slots; every source is read before a write."""
        flat = self._data.flatten(1, 2)
        flat.index_copy_(1, destination, flat.index_select(1, source))

    def move_slot(self, source: int, destination: int, rows: int) -> None:
        """Copy the first `rows` rows of one slot over another's."""
        self._data[:, destination, :rows] = self._data[:, source, :rows]

    def clear(self, slot: int, rows: int) -> None:
        """Fill the first `rows` rows of a slot with zeros."""
        self._data[:, slot, :rows].zero_()

    def save(self, slot: int, rows: int) -> Tensor:
        """A copy of the first rows of a slot: [layers, rows, 2 * kv heads, dim]."""
        return self._data[:, slot, :rows].clone()

    def restore(self, slot: int, saved: Tensor) -> None:
        """Write saved rows to the start of a slot."""
        self._data[:, slot, : saved.shape[1]] = saved

    def _adopt(self, data: Tensor) -> None:
        self._data = data
        self.rows = data.flatten(1, 2).unbind(0)


@dataclass(frozen=True, slots=True)
class Prefix:
    """K/V of a token sequence: one tensor [layers, tokens, ...] a cache."""

    tokens: _Ids
    saved: tuple[Tensor, ...]


class PrefixCache:
    """K/V of finished requests, found by longest common prefix, forgotten least recently used first.

    Requests with different salts never share. A sequence that continues a stored one replaces it.

    Args:
        limit: tokens kept in all; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[int, tuple[str, Prefix]] = OrderedDict()
        self._next = 0
        self.tokens = 0

    def insert(self, salt: str, prefix: Prefix) -> None:
        """Keep a sequence, unless a stored one already holds it or it is longer than the whole cache."""
        count = len(prefix.tokens)
        if not 0 < count <= self._limit:
            return
        for key, (other_salt, other) in list(self._entries.items()):
            if other_salt != salt:
                continue
            common = _common(other.tokens, prefix.tokens)
            if common == count:
                self._entries.move_to_end(key)
                return
            if common == len(other.tokens):
                self._drop(key)
        self._entries[self._next] = (salt, prefix)
        self._next += 1
        self.tokens += count
        while self.tokens > self._limit:
            self._drop(next(iter(self._entries)))

    def longest(self, salt: str, tokens: Sequence[int]) -> tuple[int, tuple[Tensor, ...]]:
        """How many of `tokens` a stored sequence begins with, and its K/V; (0, ()) if none does."""
        wanted = np.asarray(tokens, dtype=np.int64)
        best, best_key = 0, -1
        for key, (other_salt, prefix) in self._entries.items():
            if other_salt == salt and (common := _common(prefix.tokens, wanted)) > best:
                best, best_key = common, key
        if not best:
            return 0, ()
        self._entries.move_to_end(best_key)
        return best, self._entries[best_key][1].saved

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.tokens = 0

    def _drop(self, key: int) -> None:
        self.tokens -= len(self._entries.pop(key)[1].tokens)


def _common(left: _Ids, right: _Ids) -> int:
    """Length of the common prefix."""
    count = min(len(left), len(right))
    different = np.flatnonzero(left[:count] != right[:count])
    return int(different[0]) if len(different) else count
