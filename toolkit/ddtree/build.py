"""`python -m toolkit.ddtree.build`: check environment and checkpoints, warm up and tune, write a manifest.

Progress goes to standard error, one line a step. Exit status 0: the manifest is written; 1: it cannot be; 2:
the environment, a checkpoint or an argument cannot be served. What is slow is kept in the cache directory:
file hashes by size, time and inode, tuned values by device, driver, versions and shapes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.manifest import (
    Cache,
    checkpoint,
    conclude,
    device_facts,
    digest,
    hashes,
    say,
    versions_of,
)
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, Request, SamplingParams, TreeLimits

_PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "numpy")
_REPEATS = 15
_CONTEXT = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Build; returns the exit status."""
    args = _parse(argv)
    return conclude(lambda: build(args), args.out, CheckpointError, ValueError)


def build(args: argparse.Namespace) -> dict[str, Any]:
    """Check, hash, warm up and tune.

    Args:
        args: see `main --help`.

    Returns:
        The manifest: `versions`, `device`, `checkpoints`, `shapes`, `tuned`, `seconds`.

    Raises:
        BuildError: the environment lacks something.
        CheckpointError: a checkpoint cannot be served.
        ValueError: the arguments do not fit the models.
    """
    started = time.monotonic()
    cache = Cache(args.cache_dir)
    say(f"environment: Python {platform.python_version()}, torch {torch.__version__}")
    versions, device = versions_of(_PACKAGES), device_facts(args.device)
    say(f"device: {device['name']}")
    target = checkpoint(args.model_path, "target")
    draft = args.speculative_draft_model_path
    drafter = None if draft is None else checkpoint(draft, "drafter")
    engine = _load(args, target, drafter)
    checkpoints = {"target": hashes(target, cache)}
    if drafter is not None:
        checkpoints["drafter"] = hashes(drafter, cache)
    shapes = _shapes(engine)
    key = digest({"device": device, "versions": versions, "shapes": _tuned_shapes(shapes, args.device)})
    tuned = cache.get("tuned", key)
    if tuned is None:
        tuned = _tune(engine)
        cache.put("tuned", key, tuned)
    else:
        say("tuned values: from the cache")
    return {
        "versions": versions,
        "device": device,
        "checkpoints": checkpoints,
        "shapes": shapes,
        "tuned": tuned,
        "seconds": round(time.monotonic() - started, 3),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.ddtree.build", description=__doc__.split("\n")[0]
    )
    bundled = "checkpoint directory, or 'bundled'"
    parser.add_argument("--model-path", required=True, help=f"target: {bundled}")
    parser.add_argument(
        "--speculative-draft-model-path", help=f"drafter: {bundled}; without it, plain decoding"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--speculative-ddtree-budget", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--speculative-ddtree-expansion", choices=[str(item) for item in Expansion], default="best_first"
    )
    parser.add_argument(
        "--speculative-dflash-block-size", type=int, help="slots of a draft block; default: the drafter's own"
    )
    parser.add_argument("--max-running-requests", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--cache-dir", type=Path, help="where hashes and tuned values are kept; none: nowhere"
    )
    parser.add_argument("--out", type=Path, required=True, help="manifest to write, JSON")
    return parser.parse_args(argv)


def _load(args: argparse.Namespace, target: Path, drafter: Path | None) -> Engine:
    for name, path in (("target", target), ("drafter", drafter)):
        if path is not None:
            say(f"{name}: {path}")
    config = EngineConfig(
        model_path=target,
        draft_model_path=drafter,
        algorithm=Algorithm.NONE if drafter is None else Algorithm.DDTREE,
        limits=TreeLimits(args.speculative_ddtree_budget, 8, Expansion(args.speculative_ddtree_expansion)),
        block_size=args.speculative_dflash_block_size,
        dtype=args.dtype,
        device=args.device,
        max_running_requests=args.max_running_requests,
        prefix_cache_tokens=0,
    )
    return Engine(config)


def _shapes(engine: Engine) -> dict[str, Any]:
    target = engine.models.target.config
    return {
        "dtype": engine.config.dtype,
        "layers": target.num_hidden_layers,
        "hidden": target.hidden_size,
        "heads": [target.num_attention_heads, target.num_key_value_heads, target.head_dim],
        "vocabulary": target.vocab_size,
        "block_size": engine.block_size,
        "verify_width": 1 if engine.models.drafter is None else engine.config.limits.budget + 1,
        "requests": engine.config.max_running_requests,
    }


def _tuned_shapes(shapes: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What tuned values depend on.

    No CPU kernel is compiled for a tree's width, and while a server runs beside the build, times of two
    widths differ by its load more than by the width.
    """
    return {name: value for name, value in shapes.items() if device != "cpu" or name != "verify_width"}


def _tune(engine: Engine) -> dict[str, Any]:
    """Run every shape once, which compiles the kernels, then find the number of CPU threads."""
    say("warm-up")
    _warm_up(engine)
    if engine.config.device != "cpu":
        return {}
    before = torch.get_num_threads()
    measured = {}
    for threads in _thread_counts():
        torch.set_num_threads(threads)
        measured[threads] = _round_milliseconds(engine)
        say(f"threads {threads}: " + ", ".join(f"{name} {ms} ms" for name, ms in measured[threads].items()))
    torch.set_num_threads(before)
    best = min(measured, key=lambda threads: list(measured[threads].values())[-1])
    return {"threads": best, "milliseconds": {str(threads): found for threads, found in measured.items()}}


def _warm_up(engine: Engine) -> None:
    for requests in (1, engine.config.max_running_requests):
        for index in range(requests):
            sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
            engine.add(Request(f"warm-up-{index}", (index % 7, 1, 2), sampling))
        while engine.has_work:
            engine.step()


def _thread_counts() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return sorted({1, *(1 << bit for bit in range(cores.bit_length()) if 1 << bit <= cores), cores})


@torch.inference_mode()
def _round_milliseconds(engine: Engine) -> dict[str, float]:
    """Median time of one plain step and, with a drafter, of drafting and verifying one tree."""
    models = engine.twin().models
    vocabulary = models.target.config.vocab_size
    models.append([i % vocabulary for i in range(_CONTEXT)])
    token = torch.zeros(1, dtype=torch.int64, device=models.device)

    def decode() -> None:
        models.target.logits(models.append([1], _CONTEXT)[0])

    def verify() -> None:
        models.draft(token, [_CONTEXT])
        width = engine.config.limits.budget + 1
        models.target.logits(models.append([i % vocabulary for i in range(width)], _CONTEXT)[0])

    found = {"decode": _median_milliseconds(decode)}
    if models.drafter is not None:
        found["draft and verify"] = _median_milliseconds(verify)
    return found


def _median_milliseconds(function: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 3)


if __name__ == "__main__":
    sys.exit(main())
