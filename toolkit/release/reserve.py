"""Space kept on the disk, so that a service can be stopped and started when nothing else fits there.

Each purpose has a file of its own, so that one never uses up what another needs. The files lie beside the
lock; one is given up when a write finds the disk full, and made again as soon as there is space.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from toolkit.files import PRIVATE_FILE
from toolkit.layout import ServicePaths

Purpose = Literal["lock", "transaction", "history"]
_T = TypeVar("_T")
# Bytes; a transaction's journal takes 256 KiB of its share.
_SIZES: dict[Purpose, int] = {"lock": 8 << 10, "transaction": 320 << 10, "history": 16 << 10}
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """The space kept for one service."""

    def __init__(self, paths: ServicePaths) -> None:
        self._files: dict[Purpose, Path] = {purpose: paths.state / f"reserve.{purpose}" for purpose in _SIZES}

    @property
    def whole(self) -> bool:
        """Whether nothing of it is used; False also where there never was space for it."""
        return all(file.is_file() for file in self._files.values())

    def fill(self) -> None:
        """Reserve what is not; where the disk is too full for it, it is left for the next time."""
        for purpose, file in self._files.items():
            with contextlib.suppress(OSError):
                _allocate(file, _SIZES[purpose])

    def write(self, purpose: Purpose, action: Callable[[], _T]) -> _T:
        """What `action` returns; should it find the disk full, it is called again with the reserved space.

        Args:
            purpose: whose space.
            action: leaves nothing behind when it fails.

        Raises:
            OSError: whatever `action` raises, at last.
        """
        try:
            return action()
        except OSError as error:
            if error.errno not in _FULL or not self._files[purpose].is_file():
                raise
        self._files[purpose].unlink(missing_ok=True)
        return action()


def _allocate(file: Path, size: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
