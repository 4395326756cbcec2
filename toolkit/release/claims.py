"""Who works where no service's own lock can be held: first deploys, and removals.

The lock of a service lies in its folders, which its first deploy has yet to make and its removal takes away.
Both hold a flock(2) on a small file in the user's state folder meanwhile; the kernel frees it at their death.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.errors import LockedError, ToolkitError
from toolkit.files import PRIVATE_FILE, flocked, json_bytes, read_json
from toolkit.layout import Layout, records
from toolkit.release.lock import LockInfo, Waiting, holder_here, sound

_POLL = 0.2
_LOOK = 0.1  # seconds; whoever looks at a lock holds it for a moment
_END = ".first"
_HINT = "wait for its end, or with --lock-wait, and run the same command again"


@contextmanager
def claim(
    layout: Layout,
    name: str,
    command: str,
    *,
    wait: float = 0.0,
    on_wait: Callable[[str], None] | None = None,
    removing: bool = False,
) -> Iterator[None]:
    """Let nobody else begin with a service, nor take away what services share, during the body.

    Args:
        layout: where things lie.
        name: the service, whether it is there or not.
        command: what is done, shown to others.
        wait: seconds to wait for another claim, or for a removal.
        on_wait: told who is waited for, and how long yet.
        removing: this is the removal.

    Raises:
        LockedError: another one is at work.
        ToolkitError: the file cannot be made.
    """
    path = _file(name)

    def busy() -> str:
        return _said(name, path)

    with _taken(path, wait, busy, on_wait, beside=None if removing else _removals()) as fd:
        told = {"holder": holder_here(command).to_json(), "root": _root(layout)}
        with contextlib.suppress(OSError):  # the words alone are missed on a full disk
            os.pwrite(fd, json_bytes(told), 0)
        yield


def claims(layout: Layout, *, but: str = "") -> list[str]:
    """Services below a layout that are claimed now, in words: `NAME (COMMAND by WHO)`; not the one `but`."""
    found = []
    for path in sorted(records().glob(f".*{_END}")):
        name = path.name.removesuffix(_END)[1:]
        if name == but or not flocked(path):
            continue
        holder, root = _read(path)
        if holder is None:  # it was made just now
            found.append(name)
        elif root == _root(layout):
            found.append(f"{name} ({holder.command} by {holder.who})")
    return found


def first_deploys() -> dict[str, LockInfo | None]:
    """Services of this user whose first deploy holds a claim now, with whose; None where it was just made."""
    found = {}
    for path in sorted(records().glob(f".*{_END}")):
        if flocked(path):
            holder, _ = _read(path)
            if holder is None or holder.command.startswith("deploy"):
                found[path.name.removesuffix(_END)[1:]] = holder
    return found


def abandoned(name: str) -> Iterator[Path]:
    """What a killed process has left of its claim on a service."""
    path = _file(name)
    if path.is_file() and not flocked(path):
        yield path


@contextmanager
def removal(name: str, wait: float) -> Iterator[None]:
    """Let nobody else remove a service on this machine during the body.

    Args:
        name: the service that is to be removed, for the message.
        wait: seconds to wait for another removal.

    Raises:
        LockedError: another one is under way.
        ToolkitError: the lock cannot be made.
    """
    with _taken(_removals(), wait, lambda: _removing(name), None):
        yield


@contextmanager
def _taken(
    path: Path,
    wait: float,
    busy: Callable[[], str],
    on_wait: Callable[[str], None] | None,
    *,
    beside: Path | None = None,
) -> Iterator[int]:
    """Hold the flock of a file that is there only while it is held, and not while `beside` is held.

    Whoever holds `beside` looks at such files after that, so that one of both always sees the other.
    """
    end, waiting = time.monotonic() + max(wait, _LOOK), Waiting(on_wait if wait else None)
    while True:
        why = ""
        if (fd := _take(path)) is None:
            why = busy()
        elif beside is not None and flocked(beside):
            _drop(path, fd)
            why = _removing(path.name.removesuffix(_END)[1:])
        else:
            break
        if (left := end - time.monotonic()) <= 0:
            raise LockedError(why, hint=_HINT)
        waiting.tell(why, left)
        time.sleep(min(_POLL, left))
    try:
        yield fd
    finally:
        _drop(path, fd)


def _take(path: Path) -> int | None:
    """The descriptor of a lock that was free; None where another holds it, or removed it just now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    except FileNotFoundError:  # whoever left just now removed the folder
        return None
    except FileExistsError as error:
        if _no_folder(Path(error.filename)):
            raise _untakeable(path, error) from error
        return None  # mkdir found a folder, and before it looked what that was, whoever left removed it
    except OSError as error:
        raise _untakeable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.lstat().st_ino == os.fstat(fd).st_ino:
            os.ftruncate(fd, 0)
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:  # a pipe, or a file system without locks
        os.close(fd)
        raise _untakeable(path, error) from error
    os.close(fd)
    return None


def _no_folder(place: Path) -> bool:
    """Whether something else lies there; one look, since folders come and go."""
    try:
        kind = place.lstat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(kind) and not place.is_dir()


def _untakeable(path: Path, error: OSError) -> ToolkitError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, and run the same command again"
    else:
        hint = f"remove {path} if it is no file of yours, and make {path.parent} a folder that you can write"
    return ToolkitError(f"{path}: cannot take the lock: {error.strerror}", hint=hint)


def _drop(path: Path, fd: int) -> None:
    """Free a lock, and remove its file with the folders that hold nothing else."""
    with contextlib.suppress(OSError):  # what stays is locked by nobody
        path.unlink(missing_ok=True)
    os.close(fd)
    with contextlib.suppress(OSError):
        for folder in list(path.parents)[:4]:
            folder.rmdir()


def _file(name: str) -> Path:
    return records() / f".{name}{_END}"


def _removals() -> Path:
    return records() / ".removal.lock"


def _removing(name: str) -> str:
    return f"{name}: a service is being removed on this machine just now"


def _said(name: str, path: Path) -> str:
    holder, _ = _read(path)
    if holder is None:
        return f"{name} is locked by someone who has just begun"
    return f"{name} is locked by {holder.who} {holder.held()}: {holder.command}"


def _read(path: Path) -> tuple[LockInfo | None, Any]:
    """Who claims something, and below which root; None as long as that is not written, or damaged."""
    value = read_json(path)
    with contextlib.suppress(TypeError, KeyError):
        holder = LockInfo(**value["holder"])
        return (holder, value["root"]) if sound(holder) else (None, None)
    return None, None


def _root(layout: Layout) -> str | None:
    return None if layout.root is None else str(layout.root)
