"""What is on record about a service's last start under systemd, for whoever looks later."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.files import Record, make_private, read_record
from toolkit.layout import ServicePaths
from toolkit.service.manager import Leftover

_MAX_LEFTOVERS = 20


@dataclass(frozen=True, slots=True)
class Started:
    """The last start.

    Attributes:
        release: id of the release.
        time: seconds since the epoch.
        digest: sha256 of the unit file.
        boot: id of the boot (random(4)).
        host: address that the server binds.
        port: TCP port that the server binds.
        gpus: GPUs that it uses.
        stop_timeout: seconds from SIGTERM to SIGKILL.
        kill_wait: seconds from SIGKILL until a process counts as not to be killed.
        invocation: systemd's id of the start; "" until it is known.
        asked_to_stop: whether a stop was asked for since.
        stopped: how that stop went, for people.
        ended: when that stop was done, seconds since the epoch; 0 while none was.
        leftovers: processes that it could not end.
    """

    release: str
    time: float
    digest: str
    boot: str
    host: str
    port: int
    gpus: int
    stop_timeout: float
    kill_wait: float
    invocation: str = ""
    asked_to_stop: bool = False
    stopped: str = ""
    ended: float = 0.0
    leftovers: tuple[Leftover, ...] = ()


def write_started(paths: ServicePaths, started: Started) -> None:
    """Put it on record, also on a full disk once there was a record.

    Raises:
        OSError: there is no record yet and no space for one.
    """
    make_private(paths.state)
    record = Record(paths.started)
    try:
        value = asdict(started)
        value["leftovers"] = value["leftovers"][:_MAX_LEFTOVERS]
        record.write(value)
    finally:
        record.close()


def read_started(paths: ServicePaths) -> Started | None:
    """What is on record; None where nothing readable is."""
    value: dict[str, Any] | None = read_record(paths.started)
    if value is None:
        return None
    try:
        value["leftovers"] = tuple(Leftover(**item) for item in value["leftovers"])
        return Started(**value)
    except (KeyError, TypeError):
        return None
