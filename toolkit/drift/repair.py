"""Modes and owners set right. Root does it, so nothing here follows a link that others could put there."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def set_mode(path: Path, mode: int) -> None:
    """Give a file or folder a mode.

    Raises:
        OSError: it is gone or a link, or it belongs to someone else.
    """
    with _held(path) as held:
        os.chmod(held, mode)  # noqa: PTH101  a path of proc(5) that leads to what is held, whatever is renamed


def give_to_root(path: Path) -> None:
    """Let a file or folder belong to root, and to root's group.

    Raises:
        OSError: it is gone or a link, or this is not root.
    """
    with _held(path) as held:
        os.chown(held, 0, 0)


def give_below(folder: Path, user: str) -> None:
    """Let everything below a folder belong to a user.

    The user may change names there meanwhile, so each is looked up in an open folder, and what was opened is
    given away. A file that has a second name is left alone: it may be one that is not the user's to have.

    Raises:
        OSError: a folder cannot be read.
        KeyError: there is no such user.
    """
    account = pwd.getpwnam(user)
    for _, folders, names, descriptor in os.fwalk(folder, follow_symlinks=False):
        for name in (*folders, *names):
            _give(name, descriptor, account.pw_uid, account.pw_gid)


def _give(name: str, folder: int, uid: int, gid: int) -> None:
    try:
        held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return  # removed meanwhile
    try:
        status = os.fstat(held)
        if status.st_uid == uid or (status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode)):
            return
        os.chown(f"/proc/self/fd/{held}", uid, gid)
    finally:
        os.close(held)


@contextmanager
def _held(path: Path) -> Iterator[str]:
    """A path that leads to what `path` names now, which is no link."""
    held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_ISLNK(os.fstat(held).st_mode):
            raise OSError(f"{path} is a link")
        yield f"/proc/self/fd/{held}"
    finally:
        os.close(held)
