"""One removal at a time on a machine: the lock of a service goes with its folders, before the rest does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import LockedError, ToolkitError
from toolkit.files import PRIVATE_DIR, PRIVATE_FILE
from toolkit.layout import Layout

_POLL = 0.2


@contextlib.contextmanager
def alone(layout: Layout, name: str, wait: float) -> Iterator[None]:
    """Let nobody else remove a service below a layout during the body.

    Args:
        layout: where things lie.
        name: the service that is to be removed, for the message.
        wait: seconds to wait for another removal.

    Raises:
        LockedError: another one is under way.
        ToolkitError: the lock cannot be made.
    """
    path, end = layout.state / ".uninstall.lock", time.monotonic() + wait
    while (fd := _taken(path)) is None:
        if time.monotonic() >= end:
            raise LockedError(
                f"{name}: a service is being removed on this machine just now",
                hint="wait for its end, or with --lock-wait, and run the same command again",
            )
        time.sleep(_POLL)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _taken(path: Path) -> int | None:
    """The descriptor of a lock that was free; None where another holds it, or removed it just now."""
    try:
        path.parent.mkdir(mode=PRIVATE_DIR, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError as error:
        raise ToolkitError(f"{path}: cannot take the lock: {error.strerror}") from error
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.lstat().st_ino == os.fstat(fd).st_ino:
            return fd
    os.close(fd)
    return None
