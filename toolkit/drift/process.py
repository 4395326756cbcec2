"""The process that runs: which release it is, its arguments, environment, user and limits (proc(5))."""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.plan.finding import Drift
from toolkit.release import history
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release
from toolkit.service.manager import Difference, ProcessStatus
from toolkit.service.systemd_manager import SystemdManager
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
    yield from (_difference(host, unit.name, item) for item in status.differences)
    if status.pid is None:
        if not history.stopped_on_request(host.paths):
            said, start = f"does not run: {status.message}", f"ddtoolkit start {unit.name}"
            yield Drift("process", unit.name, said, start, "running", status.state, "planned")
        return
    if status.release != current.id:
        said = f"release {status.release} runs, {current.id} is current"
        yield Drift("process", unit.name, said, restart, current.id, str(status.release), "restart")
    for left in status.leftovers:
        kill = f"kill it: kill -9 {left.pid}"
        yield Drift("process", str(left), "outlived a stop", kill, "ended by the stop", "runs")
    try:
        yield from _facts(status.pid, unit, restart)
    except OSError:
        return  # it ended meanwhile


def _difference(host: ServiceHost, name: str, item: Difference) -> Drift:
    """What the manager's status tells, with what a deploy does about it."""
    expected = "as the last start by this tool left it"
    restart = f"ddtoolkit restart {name}"
    if item.cure == "restart":
        return Drift("unit", name, item, restart, expected, item, "restart")
    manager = host.manager(None)
    if item.cure == "note" and isinstance(manager, SystemdManager):
        return Drift("unit", name, item, restart, expected, item, "repair", manager.note_start)
    path = item.partition(" changes the unit")[0]
    by_hand = f"rm {path}; systemctl daemon-reload; {restart}" if path != item else restart
    return Drift("unit", name, item, by_hand, expected, item)


def _facts(pid: int, unit: Unit, restart: str) -> Iterator[Drift]:
    folder = Path(f"/proc/{pid}")
    subject = f"process {pid}"

    def differs(said: str, expected: str, seen: str) -> Drift:
        return Drift("process", subject, said, restart, expected, seen, "restart")

    arguments = _words((folder / "cmdline").read_bytes())
    if not _same_words(unit, arguments):
        said = "its arguments are not those of the release"
        yield differs(said, shlex.join(unit.argv), _other_words(unit.argv, arguments))
    environment = dict(word.partition("=")[::2] for word in _words((folder / "environ").read_bytes()))
    for name, value in unit.environment.items():
        if (seen := environment.get(name)) != value:
            said = f"its variable {name} is not that of the release"
            # What somebody put there by hand is not ours to show: it may be a secret.
            yield differs(said, value, "unset" if seen is None else "another value")
    if unit.user is not None:
        runs_as = _user((folder / "status").read_text(encoding="utf-8"))
        if runs_as != unit.user:
            yield differs(f"runs as {runs_as}, not as {unit.user}", unit.user, runs_as)
    for key, soft in _limits((folder / "limits").read_text(encoding="utf-8"), unit):
        yield differs(f"its limit {key} is {soft}, not infinity", "infinity", soft)


def _same_words(unit: Unit, arguments: Sequence[str]) -> bool:
    """Whether a process has a unit's arguments; where its secrets lie, the service manager decides."""
    return len(arguments) == len(unit.argv) and all(
        word in (seen, unit.secrets_file) for word, seen in zip(unit.argv, arguments, strict=True)
    )


def _other_words(wanted: Sequence[str], seen: Sequence[str]) -> str:
    """Which options differ, without their values: those that a person added may be secrets."""
    names = [word.partition("=")[0] for word in (*wanted, *seen) if word.startswith("--")]
    other = [name for name in dict.fromkeys(names) if _value_of(name, wanted) != _value_of(name, seen)]
    return f"other values of {', '.join(other)}" if other else "other arguments"


def _value_of(name: str, words: Sequence[str]) -> list[str]:
    """What stands behind an option, up to the next one."""
    found: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            inside = word.partition("=")[0] == name
        if inside:
            found.append(word)
    return found


def _words(data: bytes) -> list[str]:
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


def _user(status: str) -> str:
    uid = next(int(line.split()[2]) for line in status.splitlines() if line.startswith("Uid:"))
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _limits(text: str, unit: Unit) -> Iterator[tuple[str, str]]:
    """Soft limits below the `infinity` that the unit asks for, each with its value.

    A container may not be able to grant it.
    """
    if _CONTAINER.exists():
        return
    for key, label in _LIMITS.items():
        if key not in unit.limits or unit.limits[key] is not None:
            continue
        line = next(line for line in text.splitlines() if line.startswith(label))
        soft = line[len(label) :].split()[0]
        if soft != "unlimited":
            yield key, soft
