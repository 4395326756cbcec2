"""The debug line: one JSON object a verify step, in a rotated file that never stops serving."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from dataclasses import asdict
from pathlib import Path

from toolkit.ddtree.types import RoundStats

log = logging.getLogger(__name__)

_MODE = 0o640
_KEPT = 3  # rotated files beside the current one
_RETRY_SECONDS = 1.0


class DebugLog:
    """Appends verify steps to `path`; holds statistics only, never prompts or tokens.

    At `max_bytes` the file becomes `path.1`, which becomes `path.2`, up to `path.3`. Links are not followed.
    A write that fails (disk full, file gone) loses that line: `lost` counts it, the log names the first.

    Args:
        path: file to append to; created with mode 0640.
        max_bytes: size at which it is rotated.

    Raises:
        OSError: if the file cannot be opened now.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.lost = 0
        self._path = path
        self._max_bytes = max_bytes
        self._torn = False
        self._failing = False
        self._retry_at = 0.0
        self._fd, self._size = self._open()

    def write(self, stats: RoundStats) -> None:
        """Append one line; never raises on a full or broken disk."""
        if self._failing and time.monotonic() < self._retry_at:
            self.lost += 1
            return
        line = json.dumps(asdict(stats), separators=(",", ":")).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self.lost += 1
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            if not self._failing:
                log.warning("debug file %s: %s; lines are being lost", self._path, error.strerror)
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            self._fd, self._size = self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            self._rotate()
        # A line cut short by a full disk must not swallow the next one.
        data = b"\n" + line if self._torn else line
        written = os.write(self._fd, data)
        self._size += written
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "no space for a whole line")

    def _rotate(self) -> None:
        self.close()
        for number in range(_KEPT - 1, -1, -1):
            source = self._path if number == 0 else Path(f"{self._path}.{number}")
            if source.exists():
                source.replace(f"{self._path}.{number + 1}")
        self._fd, self._size = self._open()
        self._torn = False

    def _open(self) -> tuple[int, int]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, _MODE)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            os.fchmod(fd, _MODE)
        return fd, status.st_size
