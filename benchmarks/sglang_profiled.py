"""A plugin of SGLang that profiles decode steps of a scheduler, for sglang_profile.py."""

from __future__ import annotations

import cProfile
import os
import pstats
from pathlib import Path
from typing import Any

FIRST, STEPS = 50, 300  # steps before the host's profile begins, and steps that it sees
LATER, TRACED = 20, 40  # steps until the device's begins, and steps that it sees
LAST = FIRST + STEPS + LATER + TRACED
HOST, DEVICE = "profile.txt", "kernels.txt"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", watch, HookType.BEFORE)


def watch(scheduler: Any) -> None:
    """Profile from one decode step to a later one; the figures go into files of the engine's folder.

    First the host's calls by cProfile, then the device's kernels by torch's profiler, so that neither slows
    the other down.
    """
    import torch

    run = scheduler.run_batch
    host = cProfile.Profile()
    kinds = torch.profiler.ProfilerActivity
    device = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] * torch.cuda.is_available())])
    steps = 0

    def counted(batch: Any, *more: Any, **named: Any) -> Any:
        nonlocal steps
        if batch.forward_mode.is_decode():
            steps += 1
            if steps == FIRST:
                host.enable()
            elif steps == FIRST + STEPS:
                host.disable()
                with folder().joinpath(HOST).open("w", encoding="utf-8") as file:
                    pstats.Stats(host, stream=file).sort_stats("cumulative").print_stats(150)
            elif steps == LAST - TRACED:
                device.start()
            elif steps == LAST:
                device.stop()
                own = device.key_averages()
                tables = [
                    own.table(sort_by=key, row_limit=45, max_name_column_width=70)
                    for key in ("self_device_time_total", "self_cpu_time_total")
                ]
                folder().joinpath(DEVICE).write_text("\n".join(tables), encoding="utf-8")
        return run(batch, *more, **named)

    scheduler.run_batch = counted


def folder() -> Path:
    return Path(os.environ["DDTREE_BENCHMARK_FOLDER"])
