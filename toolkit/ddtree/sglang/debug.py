"""Debug lines: what each verify step did, measured on the device and written by a thread of its own.

The decode step only starts a copy to pinned memory. The thread waits for it and appends the lines, so neither
the device nor the disk holds up decoding.
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from toolkit.ddtree.server.debug_log import DebugLog
from toolkit.ddtree.sglang.draft import Draft
from toolkit.ddtree.sglang.kernels import Commit
from toolkit.ddtree.types import RoundStats

log = logging.getLogger(__name__)

_WAITING = 4096  # steps that may wait for the disk
_NOTHING_REJECTED = -2
_CLOSE_SECONDS = 5.0

_T = TypeVar("_T")


class _Columns(NamedTuple, Generic[_T]):
    """Columns of a step's statistics before the ranks, which take one a draft slot."""

    nodes: _T
    depth: _T
    committed: _T
    chain_in_tree: _T
    reject_rank: _T


class DebugRecorder:
    """Writes one line a request and verify step; drops lines, and counts them, rather than wait.

    Args:
        path: the debug file.
        max_bytes: size at which it is rotated.

    Raises:
        OSError: the file cannot be opened now.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.dropped = 0
        self._log = DebugLog(path, max_bytes)
        self._steps: queue.Queue[tuple[Tensor, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write, name="ddtree-debug", daemon=True)
        self._thread.start()

    def record(self, draft: Draft, commit: Commit) -> None:
        """Take note of a step. No synchronisation with the host."""
        stats = step_stats(draft, commit)
        done = None
        if stats.is_cuda:
            host = torch.empty(stats.shape, dtype=stats.dtype, pin_memory=True)
            host.copy_(stats, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            stats = host
        try:
            self._steps.put_nowait((stats, done))
        except queue.Full:
            if not self.dropped:
                log.warning("debug lines are being dropped: the disk does not keep up")
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._steps.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self._log.close()

    def _write(self) -> None:
        while (step := self._steps.get()) is not None:
            stats, done = step
            if done is not None:
                done.synchronize()
            for row in stats.tolist():
                self._log.write(_round(row))


def _round(row: list[int]) -> RoundStats:
    count = len(_Columns._fields)
    told, ranks = _Columns(*row[:count]), row[count:]
    accepted = told.committed - 1
    return RoundStats(
        nodes=told.nodes,
        depth=told.depth,
        accepted=accepted,
        committed=told.committed,
        chain_in_tree=bool(told.chain_in_tree),
        ranks=tuple(ranks[:accepted]),
        reject_rank=None if told.reject_rank == _NOTHING_REJECTED else told.reject_rank,
    )


def step_stats(draft: Draft, commit: Commit) -> Tensor:
    """Statistics of a step, on its device: int32 [R, 5 + S], `_Columns` and then the ranks by depth.

    The plain twin is `toolkit.ddtree.walk.round_stats`.
    """
    trees, slots = draft.trees, draft.trees.max_depth
    requests, width = trees.parents.shape
    on_chain = trees.depths == 0
    on_chain[:, 1:] = False
    for _ in range(slots):
        on_chain |= on_chain.gather(1, trees.parents) & (trees.ranks == 0)
    chain_depth = (trees.depths * on_chain).amax(1)

    first = torch.arange(requests, device=trees.parents.device).unsqueeze(1) * width
    ranks = trees.ranks.gather(1, (commit.rows - first)[:, 1:])
    accepted = commit.lengths.long() - 1
    last = accepted.clamp(max=slots - 1).view(-1, 1, 1).expand(-1, 1, draft.tokens.shape[2])
    is_wanted = draft.tokens.gather(1, last).squeeze(1) == commit.bonus.unsqueeze(1)
    rejected = torch.where(is_wanted.any(1), is_wanted.to(torch.int8).argmax(1), -1)
    columns = _Columns(
        nodes=trees.counts,
        depth=trees.depths.amax(1),
        committed=commit.lengths.long(),
        chain_in_tree=(chain_depth == slots).long(),
        reject_rank=torch.where(accepted < slots, rejected, _NOTHING_REJECTED),
    )
    return torch.cat([torch.stack(columns, dim=1), ranks], dim=1).to(torch.int32)
