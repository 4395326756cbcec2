"""A plugin of SGLang that profiles the scheduler's own thread in decode steps, for sglang_profile.py."""

from __future__ import annotations

import cProfile
import os
import pstats
from pathlib import Path
from typing import Any

FIRST, STEPS = 50, 300  # steps before it begins, and steps that it sees


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", watch, HookType.BEFORE)


def watch(scheduler: Any) -> None:
    """Profile from one decode step to a later one; the figures go into a file of the engine's folder."""
    run = scheduler.run_batch
    profile, steps = cProfile.Profile(), 0

    def counted(batch: Any, *more: Any, **named: Any) -> Any:
        nonlocal steps
        if batch.forward_mode.is_decode():
            steps += 1
            if steps == FIRST:
                profile.enable()
            elif steps == FIRST + STEPS:
                profile.disable()
                path = Path(os.environ["DDTREE_BENCHMARK_FOLDER"]) / "profile.txt"
                with path.open("w", encoding="utf-8") as file:
                    pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(120)
        return run(batch, *more, **named)

    scheduler.run_batch = counted
