"""A plugin of SGLang that makes every DDTREE step commit the same number of tokens, for sglang_overhead.py.

The walk runs as always; its result is then replaced by a path over every other row, so that all K/V rows of
the path but the root's are moved. The tokens mean nothing, and neither do the models' weights.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Before the step's end is recorded as a graph.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", force, HookType.BEFORE)


def force(*_: Any, **__: Any) -> None:
    """Replace the worker's walk."""
    import torch
    from torch import Tensor

    from toolkit.ddtree.sglang import tail, worker

    walk = worker.walk_trees
    committed = int(os.environ["DDTREE_FORCED_COMMIT"])

    @lru_cache
    def path(requests: int, width: int, depths: int, device: Any) -> tuple[Tensor, Tensor, Tensor]:
        nodes = torch.arange(depths, device=device)
        nodes = torch.where(nodes < committed, 2 * nodes, nodes).expand(requests, -1).contiguous()
        first = torch.arange(requests, device=device).unsqueeze(1) * width
        lengths = torch.full((requests,), committed, dtype=torch.int32, device=device)
        return nodes, nodes + first, lengths

    def forced(trees: Any, chosen: Tensor, slots: Tensor, lengths: Tensor, depths: int, *more: Any) -> Any:
        commit = walk(trees, chosen, slots, lengths, depths, *more)
        nodes, rows, own = path(*slots.shape, depths, slots.device)
        commit.lengths.copy_(own)
        commit.rows.copy_(rows)
        commit.sources.copy_(slots.gather(1, nodes))
        commit.seq_lens.copy_(lengths + committed)
        return commit

    worker.walk_trees = tail.walk_trees = forced
