"""The journal of a transaction: one JSON object a line, on disk before the effect that it announces.

The file's space is reserved when the transaction is prepared, so a full disk cannot stop a rollback; unused
space is zero bytes at the end. Progress never takes the last of it, which steps and outcome need.
"""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.files import PRIVATE_FILE, fsync_dir, parse_json, read_bytes

JOURNAL_FILE = "journal.jsonl"
_RESERVED = 1 << 18
_KEPT = 1 << 16

EventState = Literal["begin", "done", "failed", "progress"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a journal.

    Attributes:
        step: `stop_old`, `switch`, `start_new`, `ready`, `acceptance`, `commit`, ..., `outcome`.
        state: `begin` is written before the effect, `done` or `failed` after it.
        message: one line for people.
        time: seconds since the epoch.
        data: details, JSON-safe.
    """

    step: str
    state: EventState
    message: str = ""
    time: float = field(default_factory=time.time)
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class Journal:
    """Appends events."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(folder / JOURNAL_FILE, flags)
        self._size = os.fstat(self._fd).st_size
        self._position = _end(os.pread(self._fd, self._size, 0))

    def write(self, event: Event, *, durable: bool = True) -> None:
        """Append `event`; one that need not be durable is progress, for whoever watches.

        Raises:
            OSError: the disk is full beyond the reserved space, or failing; the next event takes its place.
        """
        line = json.dumps(event.to_json(), ensure_ascii=True).encode() + b"\n"
        if not durable:
            self._extend(self._position + len(line) + _KEPT)
        # Overwrites what an interrupted write may have left; readers stop at the last whole line.
        if os.pwrite(self._fd, line, self._position) < len(line):  # only a disk that fills up cuts it short
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), JOURNAL_FILE)
        self._position += len(line)
        if durable:
            os.fdatasync(self._fd)

    def _extend(self, end: int) -> None:
        """Reserve space up to `end`, so that there is always some behind it."""
        if end > self._size:
            size = end + _RESERVED
            os.posix_fallocate(self._fd, 0, size)
            self._size = size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def create_journal(folder: Path) -> None:
    """Create the empty journal in `folder` and reserve its space.

    Raises:
        OSError: the disk is full.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / JOURNAL_FILE, flags, PRIVATE_FILE)
    try:
        os.posix_fallocate(fd, 0, _RESERVED)
        os.fsync(fd)
    finally:
        os.close(fd)
    fsync_dir(folder)


def read_journal(folder: Path) -> list[Event]:
    """Every whole event of the journal in `folder`; a torn last line is left out."""
    try:
        data = read_bytes(folder / JOURNAL_FILE)
    except OSError:
        return []
    found = []
    for line in data[: _end(data)].splitlines():
        try:
            found.append(Event(**parse_json(line)))
        except (ValueError, TypeError):
            continue
    return found


def _end(data: bytes) -> int:
    """Offset behind the last whole line."""
    text = data.partition(b"\0")[0]
    return text.rfind(b"\n") + 1
