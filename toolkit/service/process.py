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
from toolkit.service.leftovers import KILL_WAIT, kill_all
from toolkit.service.logfile import tail
from toolkit.service.manager import Leftover, ProcessStatus, StopReport
from toolkit.service.processes import ProcessId, read_stat, send_signal
from toolkit.service.secrets import write_secrets
from toolkit.service.supervisor import START_NOTE, STATUS_FILE
from toolkit.service.unit import Unit, read_unit

_POLL = 0.02
_SEARCHED = 1000


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
        """Stop the service; ends within the unit's stop timeout and a few seconds, whatever it meets."""
        begin = time.monotonic()
        record = read_record(self._paths.supervisor / STATUS_FILE) or {}
        unit = self._running_unit(record)
        supervisor = ProcessId.from_json(record.get("supervisor"))
        if supervisor is not None and supervisor.alive():
            _terminate(supervisor, (unit.stop_timeout if unit else 0) + 2 * KILL_WAIT)
            record = read_record(self._paths.supervisor / STATUS_FILE) or {}
        killed = [*_leftovers(record.get("killed")), *self._kill_unsupervised(supervisor, record)]
        left = [item for item in _leftovers(record.get("leftovers")) if _still_there(item)]
        return StopReport(
            seconds=time.monotonic() - begin,
            killed=tuple(killed),
            leftovers=tuple(left),
            port_busy=ports.busy(unit.host, unit.port) if unit else "",
        )

    def status(self) -> ProcessStatus:
        """The state by the supervisor's record, checked against the processes that exist."""
        record = read_record(self._paths.supervisor / STATUS_FILE)
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

    def _running_unit(self, record: dict[str, Any]) -> Unit | None:
        release = record.get("release")
        if not isinstance(release, str):
            return None
        with contextlib.suppress(ToolkitError):
            return read_unit(self._paths.releases / release)
        return None

    def _kill_unsupervised(self, supervisor: ProcessId | None, record: dict[str, Any]) -> list[Leftover]:
        """Kill what a supervisor that died or hangs has left behind, itself included."""
        cookie = record.get("cookie")
        if not isinstance(cookie, str) or not cookie:
            return []
        if supervisor is not None and supervisor.alive():
            with contextlib.suppress(PermissionError):
                send_signal(supervisor, signal.SIGKILL)
        killed, left = kill_all(cookie)
        if killed or not record.get("asked_to_stop"):
            _record_stop(self._paths.supervisor / STATUS_FILE, record, left)
        return killed


def _terminate(supervisor: ProcessId, limit: float) -> None:
    """SIGTERM to the supervisor, then wait until it is gone or `limit` seconds are over."""
    with contextlib.suppress(PermissionError):
        send_signal(supervisor, signal.SIGTERM)
    end = time.monotonic() + limit
    while supervisor.alive() and time.monotonic() < end:
        time.sleep(_POLL)


def _record_stop(path: Path, record: dict[str, Any], left: list[Leftover]) -> None:
    message = "stopped; its supervisor had died"
    update = {
        "state": "failed" if left else "stopped",
        "message": message,
        "since": time.time(),
        "asked_to_stop": True,
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
