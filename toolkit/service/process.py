"""Service manager `process`: a detached supervisor for hosts without systemd, and for use without root.

It survives the command that started it and its terminal. It does not survive a reboot, nor a login manager
that ends a user's processes at logout (logind.conf(5), KillUserProcesses).
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.layout import ServicePaths
from toolkit.service import ports
from toolkit.service.detach import start_module
from toolkit.service.files import Record, read_record
from toolkit.service.leftovers import kill_all
from toolkit.service.logfile import tail
from toolkit.service.manager import Leftover, ProcessStatus, StopReport
from toolkit.service.processes import ProcessId, read_stat, send_signal
from toolkit.service.secrets import write_secrets
from toolkit.service.supervisor import START_NOTE, STATUS_FILE
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
        record = read_record(self._record_file)
        if record is None:
            return StopReport(0.0)
        unit = self._started_unit(record)
        kill_wait = unit.kill_wait if unit else _KILL_WAIT
        supervisor = ProcessId.from_json(record.get("supervisor"))
        if supervisor is not None and supervisor.alive():
            _terminate(supervisor, (unit.stop_timeout if unit else 0) + 2 * kill_wait + _GRACE)
            if not supervisor.alive():
                record = read_record(self._record_file) or record
                return _report(begin, unit, _leftovers(record["killed"]), _leftovers(record["leftovers"]))
            with contextlib.suppress(PermissionError):
                send_signal(supervisor, signal.SIGKILL)
        killed, left = kill_all(record["cookie"], limit=kill_wait)
        _record_stop(self._record_file, record, killed, left)
        return _report(begin, unit, killed, left)

    def status(self) -> ProcessStatus:
        """The state by the supervisor's record, checked against the processes that exist."""
        record = read_record(self._record_file)
        if record is None:
            return ProcessStatus("stopped", message="never started")
        main = ProcessId.from_json(record.get("process"))
        supervisor = ProcessId.from_json(record.get("supervisor"))
        supervised = supervisor is not None and supervisor.alive()
        state, message = record["state"], record["message"]
        pid = main.pid if main is not None and main.alive() else None
        if state in ("running", "starting") and not supervised:
            if pid is not None:
                message = "the supervisor is gone: the server runs but would not be restarted"
            else:
                state, message = "failed", "the supervisor and the server are gone (killed, or a reboot)"
        return ProcessStatus(
            state=state,
            pid=pid,
            since=record["since"],
            restarts=record["restarts"],
            exit_status=record["exit_status"],
            exit_signal=record["exit_signal"],
            release=record["release"],
            supervised=supervised,
            asked_to_stop=record["asked_to_stop"],
            message=message,
            leftovers=tuple(item for item in _leftovers(record["leftovers"]) if _still_there(item)),
        )

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines of output since the last start, across rotation."""
        found = tail(self._paths.log, max(lines, _SEARCHED))
        for index in range(len(found) - 1, -1, -1):
            if START_NOTE in found[index]:
                found = found[index + 1 :]
                break
        return found[-lines:]

    @property
    def _record_file(self) -> Path:
        return self._paths.supervisor / STATUS_FILE

    def _started_unit(self, record: dict[str, Any]) -> Unit | None:
        with contextlib.suppress(ToolkitError):
            return read_unit(self._paths.releases / str(record.get("release")))
        return None


def _terminate(supervisor: ProcessId, limit: float) -> None:
    """SIGTERM to the supervisor, then wait until it is gone or `limit` seconds are over."""
    with contextlib.suppress(PermissionError):
        send_signal(supervisor, signal.SIGTERM)
    end = time.monotonic() + limit
    while supervisor.alive() and time.monotonic() < end:
        time.sleep(_POLL)


def _report(begin: float, unit: Unit | None, killed: list[Leftover], left: list[Leftover]) -> StopReport:
    """What the stop came to; the kernel may free a killed process's port a moment after its end."""
    end = time.monotonic() + _GRACE
    while (busy := ports.busy(unit.host, unit.port) if unit else "") and time.monotonic() < end:
        time.sleep(_POLL)
    there = tuple(item for item in left if _still_there(item))
    return StopReport(time.monotonic() - begin, tuple(killed), there, busy)


def _record_stop(path: Path, record: dict[str, Any], killed: list[Leftover], left: list[Leftover]) -> None:
    """Record a stop in place of a supervisor that is no more."""
    update = {
        "state": "failed" if left else "stopped",
        "message": "stopped; its supervisor was gone" if killed else "stopped",
        "since": time.time(),
        "asked_to_stop": True,
        "killed": [[item.pid, item.name, item.start] for item in killed],
        "leftovers": [[item.pid, item.name, item.start] for item in left],
    }
    file = Record(path)
    file.write({**record, **update})
    file.close()


def _leftovers(value: Any) -> list[Leftover]:
    return [Leftover(*item) for item in value] if isinstance(value, list) else []


def _still_there(item: Leftover) -> bool:
    stat = read_stat(item.pid)
    return stat is not None and stat.live and stat.start == item.start
