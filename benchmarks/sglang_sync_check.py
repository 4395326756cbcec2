"""A plugin of SGLang that records every wait for the device in DDTREE's decode steps, for sglang_modes.py."""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

_WARM_UP = 30


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", watch, HookType.BEFORE)


def watch(scheduler: Any) -> None:
    """Wrap the worker's decode step: after a warm-up, write where it waited, and in how many steps."""
    import torch

    worker = scheduler.draft_worker
    decode = worker._decode
    path = Path(os.environ["DDTREE_BENCHMARK_FOLDER"]) / "syncs.txt"
    waits: Counter[str] = Counter()
    steps = 0

    def watched(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps <= _WARM_UP:
            return decode(*args)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return decode(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                if steps % 10 == 0:
                    lines = [f"{count} x {where}" for where, count in waits.items()]
                    path.write_text("\n".join([f"{steps - _WARM_UP} steps", *lines]) + "\n")

    def note(message: Any, *_: Any) -> None:
        if "called a synchronizing" in str(message):
            frames = [x for x in traceback.extract_stack() if "/torch/" not in x.filename][:-1]
            waits[" < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in reversed(frames[-4:]))] += 1

    worker._decode = watched
