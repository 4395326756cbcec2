"""Slots over random lives of requests, against ones that are zeroed whole."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from toolkit.ddtree.model_runner import ModelRunner
from toolkit.ddtree.types import EngineConfig


class Zeroing(ModelRunner):
    """Zeroes all rows of a freed slot, and of a moved one all behind the committed ones."""

    def release(self, slot: int, last: int, rows: int) -> None:
        for cache in self._caches:
            if slot != last:
                cache.move_slot(last, slot, rows)
                cache._data[:, slot, rows:] = 0
            cache._data[:, last] = 0


class Lives:
    """Requests that come, go on and end in both runners alike; what is written is no number."""

    def __init__(self, runners: Sequence[ModelRunner], seed: int) -> None:
        self.runners, self.random = runners, random.Random(seed)
        self.lengths: list[int] = []
        self.saved: list[tuple[int, list[tuple[torch.Tensor, ...]]]] = []

    def begin(self) -> None:
        """A request, restored from what another one left or from nothing, perhaps with a prefill."""
        slot, count, number = len(self.lengths), 0, self.random.randrange(-10, 40)
        if self.saved and self.random.random() < 0.7:
            kept, saved = self.random.choice(self.saved)
            count = self.random.randrange(1, kept + 1)
            for runner, tensors in zip(self.runners, saved, strict=True):
                runner.restore(slot, tensors, count)
        number = max(number, 0 if count else 1)
        if number:
            self._write(slot, [count], number)
        self.lengths.append(count + number)

    def go_on(self) -> None:
        """A round of all requests, of which each keeps some rows, not where they were written."""
        if not self.lengths:
            return
        number = self.random.choice([1, 4, 17])
        self._write(0, self.lengths, number)
        paths = [
            [0, *sorted(self.random.sample(range(1, number), self.random.randrange(number)))]
            for _ in self.lengths
        ]
        for runner in self.runners:
            runner.compact(self.lengths, paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def end(self) -> None:
        """A request ends; what it leaves may be kept."""
        if not self.lengths:
            return
        slot, last = self.random.randrange(len(self.lengths)), len(self.lengths) - 1
        if self.random.random() < 0.5:
            rows = self.lengths[slot]
            self.saved.append((rows, [runner.save(slot, rows) for runner in self.runners]))
        for runner in self.runners:
            runner.release(slot, last, self.lengths[last])
        moved = self.lengths.pop()
        if slot != last:
            self.lengths[slot] = moved

    def _write(self, first: int, lengths: Sequence[int], number: int) -> None:
        value = math.nan if self.random.random() < 0.3 else self.random.random()
        for runner in self.runners:
            places = runner.rows(first, lengths, torch.arange(number).expand(len(lengths), -1), None)
            for cache in runner._caches:
                layers, *_, heads, dim = cache._data.shape
                cache.write(places.slots, torch.full((len(places.slots), layers, heads, dim), value))


@pytest.mark.parametrize("seed", range(20))
def test_free_rows_are_as_if_whole_slots_were_zeroed(tiny_pair, seed: int) -> None:
    config = EngineConfig(tiny_pair.target, tiny_pair.drafter, threads=1)
    lives = Lives((ModelRunner(config), Zeroing(config)), seed)
    for _ in range(60):
        lives.random.choice([lives.begin, lives.go_on, lives.go_on, lives.end])()
        for ours, zeroed in zip(*(runner._caches for runner in lives.runners), strict=True):
            used = len(lives.lengths)
            assert not ours._data[:, used:].count_nonzero()
            for slot, length in enumerate(lives.lengths):
                both = ours._data[:, slot, :length], zeroed._data[:, slot, :length]
                assert torch.equal(*(torch.nan_to_num(data, nan=-1.0) for data in both))
