"""A plugin of SGLang that records what each tensor-parallel rank commits, for sglang_ranks.py."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", watch, HookType.BEFORE)


def watch(scheduler: Any) -> None:
    """Append one digest of trees and commits a step to the rank's own file."""
    import torch

    from toolkit.ddtree.sglang import worker

    walk = worker.walk_trees
    rank = scheduler.draft_worker.ps.tp_rank
    path = Path(os.environ["DDTREE_BENCHMARK_FOLDER"]) / f"rank{rank}.txt"

    def watched(trees: Any, chosen: Any, slots: Any, lengths: Any, depths: int) -> Any:
        commit = walk(trees, chosen, slots, lengths, depths)
        parts = (trees.tokens, trees.parents, trees.depths, commit.tokens, commit.lengths, commit.rows)
        held = torch.cat([part.flatten().long() for part in parts]).cpu().numpy().tobytes()
        with path.open("a", encoding="utf-8") as file:
            file.write(hashlib.sha256(held).hexdigest() + "\n")
        return commit

    worker.walk_trees = watched
