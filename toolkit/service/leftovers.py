"""Processes that a service leaves behind: found by ancestry and by a mark that they inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from toolkit.service.manager import Leftover
from toolkit.service.processes import Stat, carrying, descendants, identify, send_signal

# Inherited, so it finds those that left parent, group and session; systemd.exec(5) sets the same name.
COOKIE = "INVOCATION_ID"
_POLL = 0.05


def find_leftovers(cookie: str, *, below: int | None = None) -> list[Stat]:
    """Live processes of the service.

    Args:
        cookie: value of the mark.
        below: a supervisor, all of whose descendants belong to the service; None without one.
    """
    found = {stat.pid: stat for stat in carrying(COOKIE, cookie)}
    if below is not None:
        found.update((stat.pid, stat) for stat in descendants(below))
    found.pop(os.getpid(), None)
    return list(found.values())


def kill_all(cookie: str, *, limit: float, below: int | None = None) -> tuple[list[Leftover], list[Leftover]]:
    """SIGKILL every process of the service until none is left or `limit` seconds are over.

    Returns:
        those that were there, and those that are still there.
    """
    seen: dict[int, Leftover] = {}
    end = time.monotonic() + limit
    while True:
        left = find_leftovers(cookie, below=below)
        for stat in left:
            seen.setdefault(stat.pid, Leftover(stat.pid, stat.name, stat.start))
            target = identify(stat.pid)
            with contextlib.suppress(PermissionError):
                if target is not None and target.start == stat.start:
                    send_signal(target, signal.SIGKILL)
        if not left or time.monotonic() > end:
            return list(seen.values()), [seen[stat.pid] for stat in left]
        time.sleep(_POLL)
