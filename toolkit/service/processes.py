"""Processes known by pid and start time, so that a recycled pid is never taken for the old process.

Facts are from proc(5); signals go through a pidfd (pidfd_open(2)) taken before the identity is checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of /proc/PID/stat: name (2), state (3), parent (4), start in clock ticks after boot (22)."""

    pid: int
    name: str
    state: str
    parent: int
    start: int

    @property
    def live(self) -> bool:
        """Whether it can still run: neither a zombie nor dead."""
        return self.state not in "ZXx"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, also after its pid went to another.

    Attributes:
        pid: process id.
        start: start time in clock ticks after boot.
        boot: id of the boot; "" where the kernel tells none.
    """

    pid: int
    start: int
    boot: str

    def alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        stat = read_stat(self.pid)
        return stat is not None and stat.live and stat.start == self.start and self.boot == boot_id()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"pid": self.pid, "start": self.start, "boot": self.boot}

    @staticmethod
    def from_json(value: Any) -> ProcessId | None:
        """The process of `to_json`'s object; None for anything else."""
        if not isinstance(value, dict):
            return None
        pid, start, boot = value.get("pid"), value.get("start"), value.get("boot")
        if isinstance(pid, int) and isinstance(start, int) and isinstance(boot, str):
            return ProcessId(pid, start, boot)
        return None


def boot_id() -> str:
    """The kernel's random id of this boot (random(4))."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def since_boot() -> float:
    """Seconds since the boot, suspended ones among them (CLOCK_BOOTTIME): nobody sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def began(process: ProcessId) -> float:
    """When a process of this boot began, seconds since the epoch by the clock as it is set now."""
    return time.time() - since_boot() + process.start / os.sysconf("SC_CLK_TCK")


def read_stat(pid: int) -> Stat | None:
    """Facts about `pid`; None where there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    # The name may hold spaces and parentheses: the last one ends it.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Stat(pid, head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def identify(pid: int) -> ProcessId | None:
    """The process that has `pid` now."""
    stat = read_stat(pid)
    return None if stat is None else ProcessId(pid, stat.start, boot_id())


def all_stats() -> Iterator[Stat]:
    """Every process visible here."""
    for entry in os.listdir(_PROC):  # noqa: PTH208
        if entry.isdecimal() and (stat := read_stat(int(entry))) is not None:
            yield stat


def descendants(pid: int) -> list[Stat]:
    """Live processes below `pid`, children of children included."""
    children: dict[int, list[Stat]] = {}
    for stat in all_stats():
        children.setdefault(stat.parent, []).append(stat)
    found: list[Stat] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [stat.pid for stat in below]
    return [stat for stat in found if stat.live]


def carrying(variable: str, value: str) -> list[Stat]:
    """Live processes whose start environment holds `variable` with `value`.

    Finds what left its parent, group and session. A process of another user cannot be read and is not found.
    """
    entry = f"{variable}={value}".encode()
    found = []
    for stat in all_stats():
        with contextlib.suppress(OSError):
            environment = (_PROC / str(stat.pid) / "environ").read_bytes()
            if stat.live and entry in environment.split(b"\0"):
                found.append(stat)
    return found


def end_with_parent() -> Callable[[], None]:
    """What a child calls before its program begins (`preexec_fn`), to be killed when its parent dies.

    The parent is the thread that makes it (PR_SET_PDEATHSIG, prctl(2)). Children of the child live on.
    """
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def prepare() -> None:
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:
            os._exit(1)  # it had died before

    return prepare


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; a number without a name (signal(7), real-time signals) as `signal 35`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; return whether it was there.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return False
        raise
    try:
        if not process.alive():
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True
