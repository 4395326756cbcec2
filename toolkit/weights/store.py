"""Checkpoints on a host: a folder each, complete when its marker is there.

The marker is the last file that is written and has size, time, inode and SHA-256 of every other one. So a
checkpoint of any size is compared in milliseconds, and hashed again only where somebody asks for it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import json_bytes, read_json, replace_file

MARKER = ".weights.json"
PART = ".part"
OLD = ".old"
_VERSION = 1
_READABLE = 0o644
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """How a file was when its hash was taken.

    Attributes:
        size: bytes.
        mtime_ns: time of its last change, nanoseconds.
        inode: its inode.
        sha256: of its content, hexadecimal.
        corrupt: whether its content was found to have another hash since.
    """

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    corrupt: bool = False

    def fits(self, status: os.stat_result) -> bool:
        """Whether the file is still as it was."""
        now = (status.st_size, status.st_mtime_ns, status.st_ino)
        return stat.S_ISREG(status.st_mode) and now == (self.size, self.mtime_ns, self.inode)


@dataclass(frozen=True, slots=True)
class Marker:
    """What is known of a complete checkpoint.

    Attributes:
        source: where it came from, in words.
        files: by path.
        revision: commit of a repository; None for other sources.
        arrived: when, ISO 8601.
    """

    source: str
    files: Mapping[str, Mark]
    revision: str | None = None
    arrived: str = ""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(mark.size for mark in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        files = {path: asdict(mark) for path, mark in sorted(self.files.items())}
        head = {"version": _VERSION, "source": self.source, "revision": self.revision}
        return {**head, "arrived": self.arrived, "files": files}


def mark_of(path: Path, sha256: str) -> Mark:
    """How a file is now."""
    status = path.lstat()
    return Mark(status.st_size, status.st_mtime_ns, status.st_ino, sha256)


def read_marker(folder: Path) -> Marker | None:
    """The marker of a checkpoint; None where there is none that can be read."""
    value = read_json(folder / MARKER)
    try:
        files = {str(path): Mark(**item) for path, item in value["files"].items()}
        return Marker(str(value["source"]), files, value["revision"], str(value["arrived"]))
    except (TypeError, KeyError, AttributeError):
        return None


def write_marker(folder: Path, marker: Marker) -> None:
    """Write it, durable and in one step.

    Raises:
        OSError: the disk is full.
    """
    replace_file(folder / MARKER, json_bytes(marker.to_json()), mode=_READABLE)


def status_of(path: Path) -> os.stat_result | None:
    """The file's own status, never that of what it links to; None where there is no such file."""
    try:
        return path.lstat()
    except OSError:
        return None


def damage(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, a line each; empty where it is complete and unchanged.

    Reads no file but the marker.
    """
    if status_of(folder) is None:
        return ["it is not there"]
    marker = read_marker(folder)
    if marker is None:
        return ["it has no marker: it was not fetched by this tool, or is incomplete"]
    lines = (_changed(folder / path, path, mark) for path, mark in sorted(marker.files.items()))
    found = [line for line in lines if line is not None]
    found += [f"{path} does not belong to it" for path in sorted(strangers(folder, marker))]
    return found


def strangers(folder: Path, marker: Marker) -> Iterator[str]:
    """Files in a checkpoint's folder that its marker does not know; what Python compiles aside."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = (Path(root) / name).relative_to(folder).as_posix()
            if path not in marker.files and path != MARKER:
                yield path


def _changed(path: Path, name: str, mark: Mark) -> str | None:
    status = status_of(path)
    if status is None:
        return f"{name} is missing"
    if mark.corrupt:
        return f"{name} is corrupt: its SHA-256 is not the one that it came with"
    if not mark.fits(status):
        if status.st_size != mark.size:
            return f"{name} has {status.st_size} bytes, not {mark.size}"
        return f"{name} was changed or replaced since it was fetched"
    return None


def shortened(lines: list[str]) -> str:
    """The first of some lines, and how many more there are."""
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


@contextmanager
def alone(models: Path, folder: str, say: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Let only one process at a time work on a checkpoint.

    Args:
        models: folder of all checkpoints.
        folder: the checkpoint's own.
        say: told when somebody else has to end first.
        wait: wait for that end.

    Raises:
        ToolkitError: somebody else is at work, and `wait` is false.
    """
    models.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = models / f".{folder}.lock"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, models / folder, say, wait=wait)
            # Whoever had it may have removed checkpoint and lock.
            if (status := status_of(path)) is not None and status.st_ino == os.fstat(fd).st_ino:
                yield
                return
        finally:
            os.close(fd)


def _lock(fd: int, folder: Path, say: Callable[[str], None], *, wait: bool) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise ToolkitError(
                f"{folder} is being fetched or checked just now",
                hint="wait for its end, and run the same command again",
            ) from None
        say("another process works on it; waiting for its end")
        fcntl.flock(fd, fcntl.LOCK_EX)
