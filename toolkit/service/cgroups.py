"""Processes of a control group (cgroups(7), version 2 and the hybrid layout)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from toolkit.service.processes import Stat, read_stat

_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd"))


def members(group: str) -> list[Stat]:
    """Live processes in `group`, a path such as `/system.slice/x.service`, and below it."""
    for mount in _MOUNTS:
        folder = mount / group.lstrip("/")
        if group.strip("/") and (folder / "cgroup.procs").exists():
            found = [read_stat(pid) for pid in _pids(folder)]
            return [stat for stat in found if stat is not None and stat.live]
    return []


def _pids(folder: Path) -> list[int]:
    pids: list[int] = []
    for file in (folder / "cgroup.procs", *folder.rglob("*/cgroup.procs")):
        with contextlib.suppress(OSError):  # it went away meanwhile
            pids += map(int, file.read_text().split())
    return pids
