"""What was changed on a service, when, by whom, and how it ended: one JSON object a line."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import PRIVATE_FILE, parse_json, read_bytes
from toolkit.layout import ServicePaths
from toolkit.profile.changes import Change
from toolkit.release.request import Outcome, Request
from toolkit.release.reserve import Reserve


@dataclass(frozen=True, slots=True)
class Entry:
    """One change.

    Attributes:
        id: id of the transaction.
        kind: `deploy`, `swap`, `rollback`, `experiment`, `return`, `start`, `stop`, `restart`, `test`, or
            `record`, of what the server does not depend on: keys, or the time of an experiment.
        outcome: `committed`, `rolled_back`, `rollback_failed`, `first_failed`, `not_started` or `failed`.
        when: end of the change, ISO 8601 in UTC.
        who: `user@host`.
        command: the command given.
        release: release that it went to.
        base: release that it came from.
        changes: changed keys of the profile.
        message: how it ended, one line for people.
        reason: why it did not come to what was asked for; "" where it did.
        uncounted: checks of an experiment that failed, and refused nothing.
        seconds: duration by step; `total` and `downtime` among them.
    """

    id: str
    kind: str
    outcome: str
    who: str
    command: str = ""
    release: str | None = None
    base: str | None = None
    changes: tuple[Change, ...] = ()
    message: str = ""
    reason: str = ""
    uncounted: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def entry_of(request: Request, outcome: Outcome) -> Entry:
    """The entry of a change that was asked for, and how it ended."""
    return Entry(
        id=outcome.transaction,
        kind=outcome.kind,
        outcome=outcome.status,
        who=request.who,
        command=request.command,
        release=outcome.release,
        base=outcome.base,
        changes=request.changes,
        message=outcome.message,
        reason=outcome.reason,
        uncounted=outcome.uncounted,
        seconds=outcome.seconds,
    )


_KNOWN = frozenset(item.name for item in fields(Entry))


def append(paths: ServicePaths, entry: Entry) -> None:
    """Append `entry`; a last line that was cut off by a crash is closed first.

    Raises:
        ToolkitError: the file cannot be written.
    """
    line = json.dumps(entry.to_json(), ensure_ascii=True).encode() + b"\n"
    try:
        Reserve(paths).write("history", lambda: _append(paths.history, line))
    except OSError as error:
        raise ToolkitError(f"{paths.history}: cannot record the change: {error.strerror}") from error


def require_writable(paths: ServicePaths) -> None:
    """Make sure that a change could be recorded, before it is made.

    Raises:
        ToolkitError: the file is none that can be appended to.
    """
    file = paths.history
    try:
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.access(file.parent, os.W_OK | os.X_OK):
            return
        raise ToolkitError(f"{file.parent}: cannot be written", hint="nothing was changed") from None
    except OSError as error:
        said = f"{file}: cannot record the change: {error.strerror}"
        raise ToolkitError(said, hint="mend or move it; nothing was changed") from error
    os.close(fd)


def _append(path: Path, line: bytes) -> None:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, PRIVATE_FILE)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            if os.write(fd, line) < len(line):  # only a disk that fills up cuts a write short
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)  # it is tried again in reserved space
            raise
    finally:
        os.close(fd)


def stopped_on_request(paths: ServicePaths) -> bool:
    """Whether the service is stopped because someone asked, so that nothing may start it by itself."""
    for entry in reversed(read(paths)):
        if not _leaves_it(entry):
            return (entry.kind, entry.outcome) == ("stop", "committed")
    return False


def _leaves_it(entry: Entry) -> bool:
    """Whether the service is to run after this change exactly if it was to run before."""
    # A rollback, and the return from an experiment, leave a service stopped that had been stopped.
    return (
        entry.kind in ("test", "return", "record")
        or entry.outcome in ("not_started", "rolled_back")
        or (entry.kind, entry.outcome) == ("stop", "failed")
    )


def served(paths: ServicePaths) -> list[str]:
    """Ids of the releases that serve or served for good, oldest first, without what was rolled back from.

    Experiments are not among them, nor what was undone.
    """
    stack: list[str] = []
    for entry in read(paths):
        if entry.outcome != "committed" or entry.release is None:
            continue
        if entry.kind == "rollback" and entry.release in stack:
            del stack[stack.index(entry.release) :]
        if entry.kind in ("deploy", "swap", "rollback") and stack[-1:] != [entry.release]:
            stack.append(entry.release)
    return stack


def read(paths: ServicePaths) -> list[Entry]:
    """Every entry, oldest first; lines that are damaged are left out."""
    try:
        data = read_bytes(paths.history)
    except OSError:
        return []
    found = []
    for line in data.splitlines():
        try:
            value = parse_json(line)
            value["changes"] = tuple(Change(**change) for change in value.get("changes", ()))
            value["uncounted"] = tuple(value.get("uncounted", ()))
            # A newer version of the toolkit may know more of a change.
            entry = Entry(**{key: item for key, item in value.items() if key in _KNOWN})
        except (ValueError, TypeError, AttributeError):
            continue
        if _sound(entry):
            found.append(entry)
    return found


def _sound(entry: Entry) -> bool:
    """Whether every value has the type that readers count on."""
    texts = [entry.id, entry.kind, entry.outcome, entry.who, entry.command, entry.when]
    texts += [entry.message, entry.reason, *entry.uncounted]
    numbers = entry.seconds.values() if isinstance(entry.seconds, dict) else (None,)
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(text, str | None) for text in (entry.release, entry.base))
        and all(isinstance(number, int | float) for number in numbers)
    )
