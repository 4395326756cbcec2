"""Service manager `process`: a detached supervisor for hosts without systemd, and for use without root.

It survives the command that started it and its terminal. It does not survive a reboot, nor a login manager
that ends a user's processes at logout (logind.conf(5), KillUserProcesses).
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import Record
from toolkit.layout import ServicePaths
from toolkit.service import logfile, ports
from toolkit.service.detach import start_module
from toolkit.service.leftovers import kill_all
from toolkit.service.manager import Leftover, ProcessStatus, StopReport
from toolkit.service.processes import ProcessId, began, read_stat, send_signal
from toolkit.service.secrets import write_secrets
from toolkit.service.supervision import STATUS_FILE, Supervision, read_supervision
from toolkit.service.supervisor import START_NOTE
from toolkit.service.unit import Unit, read_unit

_POLL = 0.02
_SEARCHED = 1000
_KILL_WAIT = 10.0
_GRACE = 1.0


class ProcessManager:
    """Runs one service under a detached supervisor.

    Attributes:
        kind: `process`.
        survives_reboot: False.
    """

    kind = "process"
    survives_reboot = False

    def __init__(self, paths: ServicePaths) -> None:
        self._paths = paths

    def check(self, release: Path) -> None:
        """Make sure that the unit of the release in folder `release` can be read.

        Raises:
            ToolkitError: it is absent or damaged.
        """
        read_unit(release)

    def enable(self) -> None:
        """Nothing starts it at boot."""

    def disable(self) -> None:
        """Nothing starts it at boot."""

    def install(self, release: Path) -> None:
        """Nothing but this tool starts it."""

    def uninstall(self) -> None:
        """Nothing but this tool starts it."""

    def start(self, release: Path) -> None:
        """Start the unit of the release in folder `release`.

        Raises:
            ToolkitError: it runs already, its port is in use, a secret is missing, or it cannot be executed.
        """
        unit = read_unit(release)
        if self.status().active:
            raise ToolkitError(f"{unit.name} runs already", hint=f"ddtoolkit restart {unit.name}")
        if why := ports.busy(unit.host, unit.port):
            raise ToolkitError(why, hint="stop what holds it, or set another service.port")
        write_secrets(unit)
        if why := start_module("toolkit.service.supervisor", str(self._paths.supervisor), str(release)):
            raise ToolkitError(f"{unit.name}: {why}")

    def stop(self) -> StopReport:
        """Stop the service for good; ends within its stop timeout and a few seconds, whatever it meets."""
        begin = time.monotonic()
        found = read_supervision(self._paths.supervisor)
        if found is None:
            return StopReport(0.0, port_busy=self._unrecorded())
        unit = self._started_unit(found)
        kill_wait = unit.kill_wait if unit else _KILL_WAIT
        supervisor = found.supervisor
        if supervisor is not None and supervisor.alive():
            _terminate(supervisor, (unit.stop_timeout if unit else 0) + 2 * kill_wait + _GRACE)
            found = read_supervision(self._paths.supervisor) or found
            if found.asked_to_stop and not supervisor.alive():
                return _report(begin, unit, found)
            with contextlib.suppress(PermissionError):
                send_signal(supervisor, signal.SIGKILL)
        killed, left = kill_all(found.cookie, limit=kill_wait)
        found = replace(
            found,
            state="failed" if left else "stopped",
            message="stopped; its supervisor was gone" if killed else "stopped",
            since=time.time(),
            asked_to_stop=True,
            killed=tuple(killed),
            leftovers=tuple(left),
        )
        record = Record(self._paths.supervisor / STATUS_FILE)
        found.write(record)
        record.close()
        return _report(begin, unit, found)

    def status(self) -> ProcessStatus:
        """The state by the supervisor's record, checked against the processes that exist."""
        found = read_supervision(self._paths.supervisor)
        if found is None:
            return ProcessStatus("stopped", message="never started")
        supervised = found.supervisor is not None and found.supervisor.alive()
        state, message = found.state, found.message
        pid = found.process.pid if found.process is not None and found.process.alive() else None
        if state in ("running", "starting") and not supervised:
            if pid is not None:
                message = "the supervisor is gone: the server runs but would not be restarted "
                message += f"(ddtoolkit restart {self._paths.base.name} gives it one)"
            else:
                state, message = "failed", "the supervisor and the server are gone (killed, or a reboot)"
        return ProcessStatus(
            state=state,
            pid=pid,
            since=_since(found, pid),
            restarts=found.restarts,
            exit_status=found.exit_status,
            exit_signal=found.exit_signal,
            release=found.release,
            supervised=supervised,
            asked_to_stop=found.asked_to_stop,
            message=message,
            leftovers=tuple(item for item in found.leftovers if _still_there(item)),
        )

    def log_tail(self, lines: int = 20, *, since: float | None = None) -> list[str]:
        """The last lines of output since the last start, across rotation; none if that was before `since`."""
        if since is not None:
            entered = self.status().since
            if entered is None or entered < since:
                return []
        found = logfile.tail(self._paths.log, max(lines, _SEARCHED))
        for index in range(len(found) - 1, -1, -1):
            if START_NOTE in found[index]:
                found = found[index + 1 :]
                break
        return found[-lines:]

    def logs(self, lines: int, *, follow: bool, ended: Callable[[], bool]) -> Iterator[str]:
        """The last lines of the log; with `follow` also each further one, across rotation.

        Raises:
            ConfigError: there is no log yet.
        """
        path = self._paths.log
        if not path.is_file():
            name = self._paths.base.name
            raise ConfigError(f"{path}: {name} has not written a log yet", hint=f"ddtoolkit status {name}")
        if follow:
            return logfile.follow(path, lines, ended=ended)
        return iter(logfile.tail(path, lines))

    def _unrecorded(self) -> str:
        """What holds the current unit's port, where no record says which processes are the service's."""
        with contextlib.suppress(ToolkitError):
            unit = read_unit(self._paths.current)
            if why := ports.busy(unit.host, unit.port):
                return f"{why}, and {self._paths.supervisor / STATUS_FILE} is missing or damaged"
        return ""

    def _started_unit(self, found: Supervision) -> Unit | None:
        with contextlib.suppress(ToolkitError):
            return read_unit(self._paths.releases / found.release)
        return None


def _since(found: Supervision, pid: int | None) -> float:
    """When it began, by the clock as it is now; what ended is known by the clock of then alone."""
    if pid is None or found.process is None:
        return found.since
    return began(found.process)


def _terminate(supervisor: ProcessId, limit: float) -> None:
    """SIGTERM to the supervisor, then wait until it is gone or `limit` seconds are over."""
    with contextlib.suppress(PermissionError):
        send_signal(supervisor, signal.SIGTERM)
    end = time.monotonic() + limit
    while supervisor.alive() and time.monotonic() < end:
        time.sleep(_POLL)


def _report(begin: float, unit: Unit | None, found: Supervision) -> StopReport:
    """What the stop came to; the kernel may free a killed process's port a moment after its end."""
    end = time.monotonic() + _GRACE
    while (busy := ports.busy(unit.host, unit.port) if unit else "") and time.monotonic() < end:
        time.sleep(_POLL)
    left = tuple(item for item in found.leftovers if _still_there(item))
    return StopReport(time.monotonic() - begin, found.killed, left, busy)


def _still_there(item: Leftover) -> bool:
    stat = read_stat(item.pid)
    return stat is not None and stat.live and stat.start == item.start
