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
KILL_WAIT = 5.0
_POLL = 0.05


def find_leftovers(cookie: str) -> list[Stat]:
    """Live processes of the service: children of this process, and whatever carries the cookie."""
    found = {stat.pid: stat for stat in (*descendants(os.getpid()), *carrying(COOKIE, cookie))}
    return list(found.values())


def kill_all(cookie: str, limit: float = KILL_WAIT) -> tuple[list[Leftover], list[Leftover]]:
    """SIGKILL every process of the service until none is left or `limit` seconds are over.

    Returns:
        those that were there, and those that are still there.
    """
    seen: dict[int, Leftover] = {}
    end = time.monotonic() + limit
    while True:
        left = find_leftovers(cookie)
        for stat in left:
            seen.setdefault(stat.pid, Leftover(stat.pid, stat.name, stat.start))
            target = identify(stat.pid)
            with contextlib.suppress(PermissionError):
                if target is not None:
                    send_signal(target, signal.SIGKILL)
        _reap()
        if not left or time.monotonic() > end:
            return list(seen.values()), [seen[stat.pid] for stat in left]
        time.sleep(_POLL)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
