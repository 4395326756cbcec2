"""Whether a TCP port is free, and who holds it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from toolkit.service.processes import descendants, read_stat

_LISTEN = "0A"


def busy(host: str, port: int) -> str:
    """Why `host`:`port` cannot be bound, "" when it can.

    Binds and closes at once, with SO_REUSEADDR, so connections in TIME_WAIT do not count (socket(7)).
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{host} is no address of this machine: {error}"
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            holder = listener(port)
            by = f" by process {holder}" if holder else ""
            return f"port {port} on {host} is in use{by} ({error.strerror})"
    return ""


def listener(port: int) -> str:
    """The process listening on TCP `port`, as `pid (name)`; "" where it cannot be told."""
    sockets = _listening_sockets(port)
    if not sockets:
        return ""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and _holds(entry, sockets):
            stat = read_stat(int(entry.name))
            return f"{entry.name} ({stat.name})" if stat else entry.name
    return ""


def foreign_listener(port: int, pid: int | None) -> str:
    """Who listens on TCP `port`, as `pid (name)`, if neither `pid` nor a process below it does; else "".

    Without a `pid` that is whoever listens. A server that could not bind may be alive for a while yet, beside
    another one that answers in its place.
    """
    sockets = _listening_sockets(port)
    if not sockets:
        return ""
    for own in () if pid is None else (pid, *(stat.pid for stat in descendants(pid))):
        folder = Path("/proc") / str(own)
        if _holds(folder, sockets) or not os.access(folder / "fd", os.R_OK):
            return ""
    return listener(port) or "another process"


def _listening_sockets(port: int) -> set[str]:
    # proc(5): columns are slot, local address, remote address, state, ..., inode in the tenth.
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{columns[9]}]")
    return found


def _holds(process: Path, sockets: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()) in sockets:
                    return True
    return False
