"""Build the engine on a host: check the environment, hash the checkpoints, warm up and tune.

    python -m toolkit.ddtree.build --model-path DIR --speculative-draft-model-path DIR --out manifest.json

Progress goes to standard error. Exit status: 0 built, 2 a checkpoint or an argument cannot be used. Hashes
are kept in the cache folder by size, mtime and inode, tuned values by device, versions and shapes, so an
unchanged build costs little more than starting Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.types import Algorithm, EngineConfig, Request, SamplingParams, TreeLimits

_LIBRARIES = ("torch", "triton", "tokenizers", "safetensors", "numpy")
_BUNDLED = Path(__file__).resolve().parent / "bundled"
_TUNING_TOKENS = 48
_TUNING_RUNS = 3
# On a busy machine one slow candidate must not hold up a deploy.
_TUNING_SECONDS = 8.0
_CHUNK = 1 << 20


def build(config: EngineConfig, cache: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Check, hash, warm up and tune.

    Args:
        config: the engine to build; `threads` None leaves their number to the tuning.
        cache: folder for hashes and tuned values.
        say: called with lines of progress.

    Returns:
        The manifest: `versions`, `device`, `checkpoints` (sha256 by file), `tuned` and `warm_up_seconds`.

    Raises:
        CheckpointError: a checkpoint cannot be served.
        ValueError: the configuration cannot be served.
    """
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in _LIBRARIES}
    device = describe_device(config.device)
    say(f"environment: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    say(f"device: {device['name']}")
    cached = _Cache(cache / "build.json")
    checkpoints = {
        role: _hashes(path, cached, say)
        for role, path in (("target", config.model_path), ("drafter", config.draft_model_path))
        if path is not None
    }
    start = time.monotonic()
    engine = Engine(config)
    _generate(engine, 8)
    say(f"loaded and warmed up in {time.monotonic() - start:.1f} s")
    key = _key(versions, device, checkpoints, config)
    tuned = cached.get(f"tuned:{key}")
    if tuned is None:
        tuned = _tune(engine, config, say)
        cached.put(f"tuned:{key}", tuned)
    else:
        say(f"tuned before: {tuned}")
    cached.save()
    return {
        "versions": versions,
        "device": device,
        "checkpoints": checkpoints,
        "tuned": tuned,
        "warm_up_seconds": round(time.monotonic() - start, 3),
    }


def describe_device(device: str) -> dict[str, Any]:
    """Name and facts of the device that decide what was tuned is good for."""
    if device == "cpu":
        return {
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory,
        "shared_memory_per_block": int(getattr(facts, "shared_memory_per_block_optin", 0)),
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _tune(engine: Engine, config: EngineConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """The number of CPU threads that decodes fastest; nothing is tuned where it is given or on a GPU."""
    if config.device != "cpu" or config.threads is not None:
        return {}
    cores = len(os.sched_getaffinity(0))
    candidates = sorted({1, 2, 4, 8, 16, cores} & set(range(1, cores + 1)))
    speeds: dict[int, float] = dict.fromkeys(candidates, 0.0)
    end = time.monotonic() + _TUNING_SECONDS
    # In turns, so that a passing load of the machine hits every candidate.
    for threads in candidates * _TUNING_RUNS:
        if time.monotonic() > end:
            break
        torch.set_num_threads(threads)
        speeds[threads] = max(speeds[threads], _generate(engine, _TUNING_TOKENS))
    best = max(candidates, key=lambda threads: speeds[threads])
    say(
        "tuning: " + ", ".join(f"{threads} threads {speed:.0f} tokens/s" for threads, speed in speeds.items())
    )
    return {
        "threads": best,
        "tokens_per_second": {str(key): round(value, 1) for key, value in speeds.items()},
    }


def _generate(engine: Engine, tokens: int) -> float:
    """Tokens a second of one greedy request."""
    engine.flush_cache()
    prompt = tuple(engine.encode("def tokens(path):\n"))
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    engine.add(Request("build", prompt, sampling))
    while engine.has_work:
        engine.step()
    return tokens / (time.perf_counter() - start)


def _key(versions: dict[str, str], device: dict[str, Any], checkpoints: Any, config: EngineConfig) -> str:
    shapes = [config.dtype, config.algorithm, config.limits.budget, config.limits.topk_cap, config.threads]
    content = json.dumps([versions, device, checkpoints, shapes], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


class _Cache:
    """A JSON file of earlier results; one that is damaged or cannot be written is done without."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = {}
        self._values: dict[str, Any] = value if isinstance(value, dict) else {}

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(self._values), encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            return


def _hashes(folder: Path, cached: _Cache, say: Callable[[str], None]) -> dict[str, str]:
    if not folder.is_dir():
        raise CheckpointError(folder, "there is no such checkpoint folder")
    hashes = {}
    for path in sorted(item for item in folder.iterdir() if item.is_file()):
        status = path.stat()
        key = f"sha256:{path}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        value = cached.get(key)
        if not isinstance(value, str):
            say(f"hashing {path}")
            with path.open("rb") as file:
                value = _sha256(file.read, status.st_size)
            cached.put(key, value)
        hashes[path.name] = value
    return hashes


def _sha256(read: Callable[[int], bytes], size: int) -> str:
    total = hashlib.sha256()
    for _ in range(0, size + 1, _CHUNK):
        total.update(read(_CHUNK))
    return total.hexdigest()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.ddtree.build", description="Build the engine on a host."
    )
    parser.add_argument("--model-path", required=True, help="target checkpoint, or `bundled`")
    parser.add_argument("--speculative-draft-model-path", help="drafter checkpoint, or `bundled`")
    parser.add_argument(
        "--speculative-algorithm", choices=list(Algorithm), help="default: DDTREE with a drafter"
    )
    parser.add_argument("--speculative-ddtree-budget", type=int, default=16)
    parser.add_argument("--speculative-ddtree-topk-cap", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cpu-threads", type=int, help="default: measured")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "ddtoolkit")
    parser.add_argument("--out", type=Path, required=True, help="where the manifest goes")
    return parser.parse_args(argv)


def _location(path: str, part: str) -> Path:
    return _BUNDLED / part if path == "bundled" else Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's description."""
    arguments = _arguments(argv)
    drafter = arguments.speculative_draft_model_path
    default = Algorithm.NONE if drafter is None else Algorithm.DDTREE
    config = EngineConfig(
        model_path=_location(arguments.model_path, "target"),
        draft_model_path=None if drafter is None else _location(drafter, "drafter"),
        algorithm=Algorithm(arguments.speculative_algorithm or default),
        limits=TreeLimits(arguments.speculative_ddtree_budget, arguments.speculative_ddtree_topk_cap),
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.cpu_threads,
    )

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    try:
        manifest = build(config, arguments.cache_dir, say)
        arguments.out.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
