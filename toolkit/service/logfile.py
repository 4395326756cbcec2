"""The server's output in a file that is rotated at a size; a full disk costs output, never the service."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

KEPT = 2
_MODE = 0o640
_BLOCK = 1 << 16


def rotated(path: Path) -> list[Path]:
    """The log's files, newest first; the first is `path` itself."""
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, KEPT + 1))]


class RotatingLog:
    """Appends bytes to `path`; at `max_size` bytes the file becomes `path`.1, that one `path`.2."""

    def __init__(self, path: Path, max_size: int) -> None:
        self._path = path
        self._max_size = max_size
        self._fd: int | None = None
        self._size = 0
        self._lost = 0

    def write(self, data: bytes) -> None:
        """Append `data`; what the disk does not take is counted, and reported once it takes something."""
        try:
            if self._fd is None or self._size + len(data) > self._max_size:
                self._reopen()
            if self._lost:
                self._append(_line(f"{self._lost} bytes of output were lost: the disk was full or failing"))
                self._lost = 0
            self._append(data)
        except OSError:
            self._lost += len(data)

    def note(self, message: str) -> None:
        """Append one line of the service manager's own."""
        self.write(_line(message))

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _reopen(self) -> None:
        if self._fd is not None:
            self.close()
            files = rotated(self._path)
            for older, newer in zip(files[:0:-1], files[-2::-1], strict=True):
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(older)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, _MODE)
        self._size = os.fstat(self._fd).st_size
        if self._size >= self._max_size:
            self._reopen()

    def _append(self, data: bytes) -> None:
        if self._fd is None:
            raise OSError("the log is not open")
        while data:
            written = os.write(self._fd, data)
            self._size += written
            data = data[written:]


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of the log, across rotation; bytes that are no UTF-8 are replaced."""
    found: list[bytes] = []
    for file in rotated(path):
        if len(found) >= lines:
            break
        with contextlib.suppress(OSError):
            found = _last_lines(file, lines - len(found)) + found
    return [line.decode("utf-8", "replace") for line in found]


def follow(path: Path, lines: int, *, ended: Callable[[], bool], poll: float = 0.2) -> Iterator[str]:
    """The last `lines` lines, then each further one as it is written, across rotation.

    Args:
        path: the log.
        lines: how many of the lines already there come first.
        ended: asked whenever nothing new is there; True ends the iteration.
        poll: seconds between looks.
    """
    file = _open(path)
    if file is not None:
        file.seek(0, os.SEEK_END)
    yield from tail(path, lines)
    rest = b""
    while True:
        while file is not None and (block := file.read(_BLOCK)):
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
        if file is None or _replaced(file.fileno(), path):
            newer = _open(path)
            if newer is not None:
                if file is not None:
                    file.close()
                file = newer
                continue
        if ended():
            break
        time.sleep(poll)
    if file is not None:
        file.close()


def _open(path: Path) -> BufferedReader | None:
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except OSError:
        return None


def _replaced(fd: int, path: Path) -> bool:
    try:
        return not os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except OSError:
        return False


def _last_lines(path: Path, lines: int) -> list[bytes]:
    file = _open(path)
    if file is None or lines <= 0:
        return []
    with file:
        position = file.seek(0, os.SEEK_END)
        data = b""
        while position > 0 and data.count(b"\n") <= lines:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            data = file.read(size) + data
    found = data.split(b"\n")
    if found and not found[-1]:
        found.pop()
    return found[-lines:]


def _line(message: str) -> bytes:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{now} ddtoolkit: {message}\n".encode()
