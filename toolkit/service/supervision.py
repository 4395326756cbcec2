"""What a supervisor puts on record about its service, for whoever looks later."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.files import Record, read_record
from toolkit.service.manager import Leftover, State
from toolkit.service.processes import ProcessId

STATUS_FILE = "status"
_MAX_MESSAGE = 1000
_MAX_LEFTOVERS = 20


@dataclass(frozen=True, slots=True)
class Supervision:
    """State of a supervised service; fields as in `manager.ProcessStatus` unless said otherwise.

    Attributes:
        supervisor: the supervisor's own process.
        process: the service's main process; None while there is none.
        cookie: mark that the service's processes inherit.
        killed: processes that outlived the main process at the last stop.
    """

    state: State
    message: str
    since: float
    release: str
    cookie: str
    supervisor: ProcessId | None = None
    process: ProcessId | None = None
    restarts: int = 0
    exit_status: int | None = None
    exit_signal: str | None = None
    asked_to_stop: bool = False
    killed: tuple[Leftover, ...] = ()
    leftovers: tuple[Leftover, ...] = ()

    def write(self, record: Record) -> None:
        """Put it on record; long texts and lists are cut to fit."""
        value = asdict(self)
        value["message"] = self.message[:_MAX_MESSAGE]
        value["killed"] = value["killed"][:_MAX_LEFTOVERS]
        value["leftovers"] = value["leftovers"][:_MAX_LEFTOVERS]
        record.write(value)


def read_supervision(folder: Path) -> Supervision | None:
    """What is on record in a supervisor's folder; None where nothing readable is."""
    value = read_record(folder / STATUS_FILE)
    if value is None:
        return None
    try:
        for key in ("supervisor", "process"):
            value[key] = ProcessId.from_json(value[key])
        for key in ("killed", "leftovers"):
            value[key] = tuple(_leftover(item) for item in value[key])
        return Supervision(**value)
    except (KeyError, TypeError):
        return None


def _leftover(value: Any) -> Leftover:
    return Leftover(**value)
