"""Space for a checkpoint: told before anything is copied, and taken before the first byte comes."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.weights.listing import File
from toolkit.weights.pace import size_words
from toolkit.weights.store import status_of

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LIBC = ctypes.CDLL(None, use_errno=True)


def to_come(folder: Path, files: Iterable[File]) -> int:
    """Bytes of the disk that the files still need: what is reserved for them already is not counted again."""
    return sum(max(file.size - _taken(folder / file.path), 0) for file in files)


def _taken(path: Path) -> int:
    status = status_of(path)
    return 0 if status is None else status.st_blocks * 512


def free_below(folder: Path) -> int:
    """Bytes free on the file system that holds a folder or its nearest existing parent."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shortage(parts: Sequence[tuple[str, int]], free: int, folder: Path) -> str | None:
    """The sum of what is needed against what is free, in words; None where it fits.

    Args:
        parts: what needs space, and bytes of each.
        free: bytes.
        folder: where.
    """
    needed = sum(count for _, count in parts)
    if needed <= free:
        return None
    terms = " + ".join(f"{what} {size_words(count)}" for what, count in parts)
    return (
        f"not enough disk below {folder}: {terms} = {size_words(needed)}, "
        f"{size_words(free)} are free: {size_words(needed - free)} short"
    )


def take(folder: Path, files: Iterable[File]) -> bool:
    """Reserve the space of all files; whether the file system can.

    The files keep their sizes, so that a size always tells how many bytes have come.

    Raises:
        OSError: the disk is full.
    """
    for file in files:
        path = folder / file.path
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if file.size and not reserve(fd, file.size, path):
                return False
        finally:
            os.close(fd)
    return True


def reserve(fd: int, size: int, path: Path) -> bool:
    """Reserve the space of one file; whether the file system can.

    Raises:
        OSError: the disk is full.
    """
    while _LIBC.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), str(path))
    return True


def full(error: OSError, folder: Path) -> ToolkitError:
    """What is told when writing failed."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        hint = "mend that, and run the same command again: it goes on with what has come"
        return ToolkitError(f"{error.filename or folder}: {error.strerror}", hint=hint)
    return ToolkitError(
        f"{error.filename or folder}: {error.strerror} ({size_words(free_below(folder))} are free)",
        hint="free some space and run the same command again: it goes on with what has come",
    )
