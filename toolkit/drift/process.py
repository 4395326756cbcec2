"""The process that runs: which release it is, its arguments, environment, user and limits (proc(5))."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from toolkit.drift.finding import Drift
from toolkit.release import history
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release
from toolkit.service.manager import ProcessStatus
from toolkit.service.unit import Unit

_CONTAINER = Path("/run/systemd/container")  # systemd's own mark of being inside one
_LIMITS = {"memlock": "Max locked memory", "nofile": "Max open files"}


def drifts(host: ServiceHost, current: Release, unit: Unit, status: ProcessStatus) -> Iterator[Drift]:
    """How what runs differs from the current release.

    Args:
        host: the service.
        current: its current release.
        unit: the release's unit.
        status: what the service manager says.
    """
    restart = f"ddtoolkit restart {unit.name}"
    for difference in status.differences:
        yield Drift("unit", unit.name, difference, restart)
    if status.pid is None:
        if not history.stopped_on_request(host.paths):
            yield Drift(
                "process", unit.name, f"does not run: {status.message}", f"ddtoolkit start {unit.name}"
            )
        return
    if status.release != current.id:
        said = f"release {status.release} runs, {current.id} is current"
        yield Drift("process", unit.name, said, restart)
    for left in status.leftovers:
        yield Drift("process", str(left), "outlived a stop", f"kill it: kill -9 {left.pid}")
    try:
        yield from _facts(status.pid, unit, restart)
    except OSError:
        return  # it ended meanwhile


def _facts(pid: int, unit: Unit, restart: str) -> Iterator[Drift]:
    folder = Path(f"/proc/{pid}")
    subject = f"process {pid}"
    arguments = _words((folder / "cmdline").read_bytes())
    if unit.secrets_file is None and arguments != list(unit.argv):
        yield Drift("process", subject, "its arguments are not those of the release", restart)
    environment = dict(word.partition("=")[::2] for word in _words((folder / "environ").read_bytes()))
    for name, value in unit.environment.items():
        if environment.get(name) != value:
            yield Drift("process", subject, f"its variable {name} is not that of the release", restart)
    if unit.user is not None:
        runs_as = _user((folder / "status").read_text(encoding="utf-8"))
        if runs_as != unit.user:
            yield Drift("process", subject, f"runs as {runs_as}, not as {unit.user}", restart)
    for line in _limits((folder / "limits").read_text(encoding="utf-8"), unit):
        yield Drift("process", subject, line, restart)


def _words(data: bytes) -> list[str]:
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


def _user(status: str) -> str:
    uid = next(int(line.split()[2]) for line in status.splitlines() if line.startswith("Uid:"))
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _limits(text: str, unit: Unit) -> Iterator[str]:
    """Soft limits below the `infinity` that the unit asks for; a container may not be able to grant it."""
    if _CONTAINER.exists():
        return
    for key, label in _LIMITS.items():
        if key not in unit.limits or unit.limits[key] is not None:
            continue
        line = next(line for line in text.splitlines() if line.startswith(label))
        soft = line[len(label) :].split()[0]
        if soft != "unlimited":
            yield f"its limit {key} is {soft}, not infinity"
