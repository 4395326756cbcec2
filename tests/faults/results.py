"""The matrix's result: a JSON file, written as it grows."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.bench import LIMIT
from tests.faults.points import FAULTS, Moment

_EVERY = 10


class Results:
    """Runs by scenario, moment and fault.

    Attributes:
        points: moments by scenario, as the last count has them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = 0
        self.points: dict[str, list[Moment]] = {}
        self.runs: dict[tuple[str, str, str], dict[str, Any]] = {}
        if path.exists():
            for run in json.loads(path.read_bytes())["runs"]:
                self.runs[run["scenario"], run["moment"], run["fault"]] = run

    def wants(self, scenario: str, moment: Moment, fault: str, *, again: bool) -> bool:
        """Whether this is still to be run."""
        run = self.runs.get((scenario, moment.key, fault))
        return run is None or (again and bool(run["problems"]))

    def has(self, job: tuple[str, Moment, str]) -> bool:
        """Whether there is a run of this already."""
        name, moment, fault = job
        return (name, moment.key, fault) in self.runs

    def add(self, run: dict[str, Any]) -> None:
        """Take a run up; every few the file is written."""
        self.runs[run["scenario"], run["moment"], run["fault"]] = run
        self._unwritten += 1
        if self._unwritten >= _EVERY:
            self.write()

    def write(self) -> None:
        """Write the file: a line a moment, a line a run."""
        self._unwritten = 0
        points = {
            name: [{**asdict(moment), "key": moment.key} for moment in moments]
            for name, moments in self.points.items()
        }
        known = {(name, item["key"]) for name, items in points.items() for item in items}
        order = {
            (name, item["key"]): index for name, items in points.items() for index, item in enumerate(items)
        }
        runs = sorted(
            (run for run in self.runs.values() if (run["scenario"], run["moment"]) in known),
            key=lambda run: (
                list(points).index(run["scenario"]),
                order[run["scenario"], run["moment"]],
                run["fault"],
            ),
        )
        head = {
            "what": "one fault at each moment of each change; seconds from the fault",
            "machine": {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "host": "Debian 12 under systemd-nspawn; contract stub as the engine",
            "bound_seconds": 2 * (LIMIT + LIMIT),
        }
        lines = [json.dumps(head, indent=1)[:-2] + ',\n "points": {']
        for name, items in points.items():
            body = ",\n".join(f"  {json.dumps(item)}" for item in items)
            lines.append(f" {json.dumps(name)}: [\n{body}\n ]{',' if name != list(points)[-1] else ''}")
        lines.append(' },\n "runs": [')
        lines.append(",\n".join(f"  {json.dumps(run)}" for run in runs))
        lines.append(" ]\n}\n")
        temporary = self._path.with_suffix(".new")
        temporary.write_text("\n".join(lines), encoding="utf-8")
        temporary.replace(self._path)


def order(job: tuple[str, Moment, str]) -> int:
    """What is most telling comes first: a transaction does not feel what becomes of those who watch it."""
    name, moment, fault = job
    if moment.role == "transaction" and fault in ("controller", "network"):
        return 3
    return {"swap": 0, "provision": 2}.get(name, 1)


__all__ = ["FAULTS", "Results", "order"]
