"""The end of a decode step as a CUDA graph: the walk, the K/V moves, and the drafter's context.

Run one by one these are a dozen launches, which at few requests cost more of the host's time than of the
device's. A graph reads what stays where it is: the trees of the drafter's graph, the hidden states of the
target's, and buffers for the rows and the target's tokens. A batch for which there is none is run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.ddtree.sglang.kernels import Commit, VerifyRows, walk_trees
from toolkit.ddtree.tree import DraftTrees

Keep = Callable[[Commit, VerifyRows, Tensor, Tensor], None]
"""Moves K/V rows and gives hidden states [R * W, hidden] at positions int64 [R * D] to the drafter."""

Record = Callable[[Callable[[], None]], Callable[[], Any]]
"""Makes of a function one that does the same again with what then lies in the tensors it reads."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a tail of R requests reads, all of it in tensors that stay where they are.

    Attributes:
        trees: of R requests, of the drafter's graph.
        hidden: [R * W, hidden], of the target's graph.
    """

    trees: DraftTrees
    hidden: Tensor

    def is_same(self, trees: DraftTrees, hidden: Tensor) -> bool:
        """Whether these lie where it reads."""
        pairs = (
            (trees.tokens, self.trees.tokens),
            (trees.parents, self.trees.parents),
            (hidden, self.hidden),
        )
        return all(ours.data_ptr() == own.data_ptr() for ours, own in pairs)


class Tails:
    """Recorded tails, one for each number of requests.

    Args:
        keep: what follows the walk.
        most: the largest number of requests.
        width: W, rows a request.
        depths: D, the most tokens a step commits.
        device: where the target is.
        record: records a function; None: as a CUDA graph.
    """

    def __init__(
        self, keep: Keep, most: int, width: int, depths: int, device: Any, record: Record | None = None
    ) -> None:
        self.rows = VerifyRows.empty(most, width, device)
        self.rows.slots.zero_()  # the cache row that SGLang gives to nobody
        self.rows.lengths.zero_()
        self.chosen = torch.zeros((most, width), dtype=torch.int64, device=device)
        self._keep = keep
        self._depths = depths
        self._steps = torch.arange(depths, device=device)
        self._record = record or _Recorder()
        self._held: list[Tensor] = []
        self._tails: dict[int, tuple[Verified, Commit, Callable[[], Any]]] = {}

    def add(self, verified: Verified) -> None:
        """Record the tail of as many requests as `verified` has."""
        requests = len(verified.trees.counts)
        rows, chosen = self.rows.first(requests), self.chosen[:requests]
        commit = Commit.empty(requests, self._depths, chosen.device)

        def tail() -> None:
            walk_trees(verified.trees, chosen, rows.slots, rows.lengths, self._depths, commit)
            positions = rows.lengths.unsqueeze(1) + self._steps
            self._keep(commit, rows, verified.hidden, positions.reshape(-1))

        self._tails[requests] = verified, commit, self._record(tail)

    def hold(self, workspaces: Any) -> None:
        """Keep an object's tensors, which recorded tails write to: it may take larger ones later."""
        self._held += [value for value in vars(workspaces).values() if isinstance(value, Tensor)]

    def chosen_of(self, requests: int) -> Tensor:
        """Where the target's tokens of a batch have to stand for its tail, int64 [R, W]."""
        return self.chosen[:requests]

    def rows_of(self, requests: int) -> VerifyRows | None:
        """Where the rows of a batch have to stand for its tail; None where it has none."""
        return self.rows.first(requests) if requests in self._tails else None

    def serves(self, trees: DraftTrees, rows: VerifyRows, hidden: Tensor) -> bool:
        """Whether a tail was recorded that reads just these.

        Args:
            trees: that were verified.
            rows: of the batch.
            hidden: [R * W, hidden], what the target gave for them.
        """
        found = self._tails.get(len(rows.lengths))
        if found is None or rows.slots.data_ptr() != self.rows.slots.data_ptr():
            return False
        return found[0].is_same(trees, hidden)

    def run(self, requests: int) -> Commit:
        """Run the tail over `rows` and `chosen`; the next overwrites the commit's `rows` and `sources`."""
        _, commit, again = self._tails[requests]
        again()
        return commit.told()


class _Recorder:
    """Records functions as CUDA graphs that share their memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self._stream  # one for all: cuBLAS keeps a workspace of tens of MB for each stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and makes workspaces outside of the graph
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            function()
        replay: Callable[[], Any] = graph.replay
        return replay
