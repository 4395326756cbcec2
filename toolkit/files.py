"""Files that survive a crash and a full disk, and are never reached through someone else's link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Any

PRIVATE_DIR = 0o700
PRIVATE_FILE = 0o600
_RECORD_SIZE = 16384
_LONGEST = 64 << 20
_ATTEMPTS = 3
_DIGITS = 6


def fsync_dir(folder: Path) -> None:
    """Make renames and new names in `folder` durable (fsync(2), "Calling fsync() does not ...")."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(folder: Path) -> Path:
    """Create `folder` and its parents, the folder itself for its owner alone; return it.

    Raises:
        OSError: it cannot be created, or is a link or no folder.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIR)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, PRIVATE_DIR)
    finally:
        os.close(fd)
    return folder


def write_new(
    path: Path, data: bytes, mode: int = PRIVATE_FILE, *, owner: tuple[int, int] | None = None
) -> None:
    """Create `path` with `data`, durable; the file must not exist, not even as a link.

    Args:
        path: the file.
        data: its content.
        mode: its permissions.
        owner: user and group ids that it is given, where the kernel lets it; None: those of this process.

    Raises:
        OSError: it exists, or the disk is full; then nothing is left behind.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if owner is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), *owner)
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def replace_file(
    path: Path, data: bytes, mode: int = PRIVATE_FILE, *, owner: tuple[int, int] | None = None
) -> None:
    """Give `path` the content `data` in one step: readers see the old or the new content.

    Args:
        path: the file.
        data: its new content.
        mode: its permissions.
        owner: as for `write_new`.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    for _ in range(_ATTEMPTS):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(_DIGITS)}")
        write_new(temporary, data, mode, owner=owner)
        try:
            temporary.replace(path)
        except FileNotFoundError:  # someone who clears up took it for a dead process's (`temporaries`)
            continue
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        break
    else:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    fsync_dir(path.parent)


def temporaries(folder: Path, name: str = "*") -> list[Path]:
    """Files in `folder` that a `replace_file` of `name` wrote and never renamed; it may still be about to."""
    ending = re.compile(rf"\.[0-9a-f]{{{2 * _DIGITS}}}$")
    return [path for path in folder.glob(f".{name}.*") if ending.search(path.name)]


def json_bytes(value: Any) -> bytes:
    """Readable JSON with a final newline."""
    return (json.dumps(value, indent=2, sort_keys=False, ensure_ascii=True) + "\n").encode()


def read_bytes(path: Path) -> bytes:
    """The content of a regular file, which a link may lead to.

    Raises:
        OSError: it is absent or cannot be read; is a pipe or a device, which may have no end; or is longer
            than anything that is written here.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if found.st_size > _LONGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def parse_json(data: bytes) -> Any:
    """Parsed JSON.

    Raises:
        ValueError: it is none, or nested too deeply to be read.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """Parsed JSON of `path`; None where it is absent or no JSON."""
    try:
        return parse_json(read_bytes(path))
    except (OSError, ValueError):
        return None


class Record:
    """A small JSON object in a file whose space is reserved, so a full disk cannot stop an update.

    The file is overwritten in place in one write(2); `read_record` retries what it reads half-written.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, PRIVATE_FILE)
        try:
            os.posix_fallocate(self._fd, 0, _RECORD_SIZE)
        except OSError:
            os.close(self._fd)
            raise

    def write(self, value: dict[str, Any]) -> None:
        """Replace the record; an I/O error is swallowed, since the service matters more than its record.

        Raises:
            ValueError: the value does not fit.
        """
        data = json.dumps(value).encode()
        if len(data) > _RECORD_SIZE:
            raise ValueError(f"a record of {len(data)} bytes does not fit {_RECORD_SIZE}")
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, data.ljust(_RECORD_SIZE), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_record(path: Path) -> dict[str, Any] | None:
    """The object of a `Record`; None where there is none."""
    for _ in range(20):
        try:
            data = read_bytes(path)
        except OSError:
            return None
        if not data.strip(b" \0"):
            return None
        with contextlib.suppress(ValueError):
            value = parse_json(data)
            return value if isinstance(value, dict) else None
        time.sleep(0.001)
    return None


def flocked(path: Path) -> bool:
    """Whether another open file holds a flock(2) on `path` now; False without such a file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
