"""Results of earlier measurements on a host, so that a fall is seen where no figure is known to be right."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.doctor.load_result import Load
from toolkit.files import json_bytes, make_private, read_json, replace_file

_KEPT = 10
_WAYS = (("to", "to"), ("back", "from"))


def figures(load: Load) -> dict[str, float]:
    """What is compared, by name: rates in 10^9 bytes a second, and seconds where the name ends in ` s`.

    An all-reduce has its bus bandwidth, 2 (n - 1) / n x bytes / seconds on n GPUs (NCCL tests,
    doc/PERFORMANCE.md), but the smallest its time.
    """
    found = {f"copy {way} GPU {item.gpu}": getattr(item, name) for item in load.alone for name, way in _WAYS}
    found |= {
        f"copy {way} GPU {item.gpu}, all at once": getattr(item, name)
        for item in load.together
        for name, way in _WAYS
    }
    found |= {f"peer GPU {item.source} to {item.target}": item.rate for item in load.peers}
    for group, size, seconds in reductions(load):
        names = ",".join(map(str, group))
        if size == smallest(load):
            found[f"all-reduce {names}, {size} bytes s"] = seconds
        elif seconds > 0:
            found[f"all-reduce {names}, {size} bytes"] = bus_bandwidth(len(group), size, seconds)
    return found


def reductions(load: Load) -> list[tuple[tuple[int, ...], int, float]]:
    """Group, bytes and seconds of every all-reduce that all ranks ended; the slowest rank counts."""
    found = []
    for group in load.groups:
        for size in sorted({item.bytes for item in load.reduced}):
            ranks = {item.gpu: item.seconds for item in load.reduced if item.bytes == size}
            if set(group) <= ranks.keys():
                found.append((group, size, max(ranks[gpu] for gpu in group)))
    return found


def smallest(load: Load) -> int:
    """Bytes of the smallest all-reduce, whose time is latency."""
    return min((item.bytes for item in load.reduced), default=0)


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """10^9 bytes a second that each GPU's link carried."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def best_of(path: Path, gpus: Mapping[int, str]) -> dict[str, float]:
    """The best of the kept results on the same GPUs, by name; {} without any.

    Args:
        path: the record.
        gpus: GPU to its UUID.
    """
    best: dict[str, float] = {}
    for entry in _entries(path):
        if entry.get("gpus") != _names(gpus) or not isinstance(entry.get("figures"), dict):
            continue
        for name, value in entry["figures"].items():
            if isinstance(value, int | float) and value > 0:
                better = min if name.endswith(" s") else max
                best[name] = better(best.get(name, float(value)), float(value))
    return best


def remember(path: Path, gpus: Mapping[int, str], load: Load) -> str:
    """Add a result to the record; why that was not possible, "" where it was."""
    entry = {"time": time.time(), "gpus": _names(gpus), "software": dict(load.software)}
    entries = [*_entries(path), {**entry, "figures": figures(load)}]
    try:
        make_private(path.parent)
        replace_file(path, json_bytes(entries[-_KEPT:]))
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def _entries(path: Path) -> list[dict[str, Any]]:
    found = read_json(path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _names(gpus: Mapping[int, str]) -> dict[str, str]:
    return {str(index): uuid for index, uuid in sorted(gpus.items())}
