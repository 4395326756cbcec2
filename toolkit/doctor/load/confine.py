"""Where a measurement runs: in a transient unit, or in a session of its own; either ends as a whole.

As root under systemd it is a unit with the service's own sandbox (systemd-run(1)); else a session, whose
processes carry a mark by which they are found. What SIGKILL does not end, since it waits in a driver, is
named and left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.doctor.load_result import Left
from toolkit.doctor.programs import ask
from toolkit.service import cgroups
from toolkit.service.detached import may_detach
from toolkit.service.leftovers import COOKIE, kill_all
from toolkit.service.processes import read_stat

# Makes modules of the texts in its request, a line of JSON, so that nothing of the toolkit need be readable
# there; the last one is what runs.
_LOADER = """
import json, sys, types
request = json.loads(sys.stdin.readline())
for name, text in request.pop("modules").items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main(request)
"""
_SLICE = "system.slice"
_STOP = 2.0  # seconds between SIGTERM and SIGKILL
_KILL_WAIT = 5.0
_POLL = 0.1


@dataclass(frozen=True, slots=True)
class Way:
    """Where a measurement runs.

    Attributes:
        python: interpreter that has torch.
        environment: of the service.
        properties: of the service's unit, `Key=value`; None runs it without a unit.
        user: of the unit.
        limit: seconds that it may take in all.
        silence: seconds in which it has to write something.
    """

    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    properties: Sequence[str] | None = None
    user: str | None = None
    limit: float = 300.0
    silence: float = 60.0


class Confined(Protocol):
    """A measurement that is kept in bounds."""

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, with pipes at its three descriptors.

        Raises:
            OSError: it cannot be started.
        """

    def end(self, child: subprocess.Popen[bytes]) -> list[Left]:
        """Kill whatever is left of it; what cannot be killed."""

    def discard(self) -> None:
        """Give up what was made for it, where it could not be started."""


def confined(way: Way) -> Confined:
    """The bounds that this machine has for it."""
    return _Unit(way) if way.properties is not None and may_detach() else _Session(way)


def _popen(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        cwd="/", start_new_session=True,
    )  # fmt: skip


def _program(way: Way) -> list[str]:
    return [way.python, "-I", "-c", _LOADER]


class _Session:
    """A child in a session of its own; what it begins carries a mark by which it is found."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._cookie = secrets.token_hex(16)
        self._folder = tempfile.TemporaryDirectory(prefix="ddtoolkit-load-", ignore_cleanup_errors=True)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it.

        Raises:
            OSError: the interpreter cannot be run.
        """
        base = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        own = {"TMPDIR": self._folder.name, COOKIE: self._cookie}
        return _popen(_program(self._way), base | dict(self._way.environment) | own)

    def end(self, child: subprocess.Popen[bytes]) -> list[Left]:
        """Kill whatever is left of it; what cannot be killed."""
        below = child.pid if child.poll() is None else None
        if below is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        _, left = kill_all(self._cookie, limit=_KILL_WAIT, below=below)
        _close(child)
        self.discard()
        return [_left(item.pid, item.name) for item in left]

    def discard(self) -> None:
        """Remove its folder."""
        self._folder.cleanup()


class _Unit:
    """A transient unit with the service's sandbox, that ends as a whole."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._name = f"ddtoolkit-load.{secrets.token_hex(4)}.service"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it.

        Raises:
            OSError: there is no systemd-run.
        """
        way = self._way
        words = ["systemd-run", "--quiet", "--collect", "--wait", "--pipe", "--no-ask-password"]
        words += [f"--unit={self._name}", f"--slice={_SLICE}"]
        words += ["--description=ddtoolkit: copies and all-reduces under load"]
        words += [f"--property={item}" for item in self._properties()]
        words += [f"--setenv={key}={value}" for key, value in way.environment.items()]
        return _popen([*words, "--", *_program(way)], os.environ | {"LC_ALL": "C.UTF-8"})

    def _properties(self) -> Iterator[str]:
        """What bounds it comes last, and so counts, whatever the service's own unit has."""
        yield from self._way.properties or ()
        if self._way.user is not None:
            yield f"User={self._way.user}"
        yield from ("Type=exec", "PrivateTmp=yes", "WorkingDirectory=/", "Restart=no")
        yield from ("KillMode=control-group", "SendSIGKILL=yes", f"TimeoutStopSec={_STOP:g}")
        yield f"RuntimeMaxSec={self._way.limit + _STOP:g}"

    def end(self, child: subprocess.Popen[bytes]) -> list[Left]:
        """Kill whatever is left of it; what cannot be killed."""
        group = f"/{_SLICE}/{self._name}"
        if child.poll() is None or cgroups.members(group):
            ask(["systemctl", "--no-ask-password", "kill", "--signal=SIGKILL", self._name], _KILL_WAIT)
            ask(["systemctl", "--no-ask-password", "stop", "--no-block", self._name], _KILL_WAIT)
        end = time.monotonic() + _KILL_WAIT
        while (left := cgroups.members(group)) and time.monotonic() < end:
            time.sleep(_POLL)
        if child.poll() is None:
            # systemd-run goes on waiting for a unit that cannot be stopped.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.0 if left else _KILL_WAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        _close(child)
        return [_left(stat.pid, stat.name) for stat in left]

    def discard(self) -> None:
        """Nothing was made before the unit."""


def _left(pid: int, name: str) -> Left:
    stat = read_stat(pid)
    return Left(pid, name, "?" if stat is None else stat.state)


def _close(child: subprocess.Popen[bytes]) -> None:
    """Give back its pipes, and its entry in the table of processes where it has ended."""
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.5)
