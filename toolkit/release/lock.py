"""Who may change a service: a controller's token, and the flock of a running transaction.

The token is a file created with O_EXCL that names its holder. A controller on this machine is known by pid
and start time, one elsewhere by its heartbeat; a token whose holder is gone is stale and is taken over,
visibly. A running transaction holds a flock, which the kernel frees at its death; no command takes it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from toolkit.errors import ConfigError, LockedError, ToolkitError
from toolkit.files import PRIVATE_FILE, flocked, json_bytes, make_private, read_json, write_new
from toolkit.layout import ServicePaths
from toolkit.release.journal import read_journal
from toolkit.release.request import read_request
from toolkit.release.reserve import Reserve
from toolkit.service.processes import ProcessId, boot_id, identify
from toolkit.spans import in_words

HEARTBEAT = 5.0
STALE_AFTER = 60.0
_POLL = 0.2
_TELL_EVERY = 5.0  # seconds between two words of who is waited for
_AGE = re.compile(r" \([\d dhmins]+\)")


@dataclass(frozen=True, slots=True)
class LockInfo:
    """The holder of a token.

    Attributes:
        token: random text that `lock release` needs.
        who: `user@host pid N`.
        command: what it is doing.
        since: seconds since the epoch.
        process: the holder on its machine.
        host: name of that machine.
    """

    token: str
    who: str
    command: str
    since: float
    process: dict[str, Any] | None
    host: str

    def age(self) -> str:
        """Time since it was taken, for people."""
        return in_words(time.time() - self.since)

    def held(self) -> str:
        """Since when it is held, and for how long, for people."""
        return _held(self.since)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class Lock:
    """The lock of one service."""

    def __init__(self, paths: ServicePaths, name: str) -> None:
        self._name = name
        self._token_file = paths.lock
        self._guard_file = paths.state / "lock.guard"
        self._flock_file = paths.state / "transaction.flock"
        self._state = paths.state
        self._transaction_folder = paths.transaction
        self._reserve = Reserve(paths)

    def holder(self) -> LockInfo | None:
        """Who holds the token, stale or not."""
        value = read_json(self._token_file)
        if not isinstance(value, dict):
            return None
        with contextlib.suppress(TypeError):
            info = LockInfo(**value)
            if sound(info):
                return info
        return self._damaged(value.get("token"))

    def stale(self, info: LockInfo) -> bool:
        """Whether the holder is gone."""
        if not info.host:
            return True
        process = _process_here(info)
        if process is not None:
            return not process.alive()
        try:
            return time.time() - self._token_file.stat().st_mtime > STALE_AFTER
        except OSError:
            return True

    def _gone(self, info: LockInfo) -> bool:
        """Whether a holder is gone for sure; of one elsewhere, a clock that was set proves nothing."""
        if not self.stale(info):
            return False
        if not info.host or _process_here(info) is not None:
            return True
        try:
            before = self._token_file.stat().st_mtime_ns
            end = time.monotonic() + 2 * HEARTBEAT
            while time.monotonic() < end:
                time.sleep(_POLL)
                if self._token_file.stat().st_mtime_ns != before:
                    return False
        except OSError:
            return True
        return True

    def transaction_running(self) -> bool:
        """Whether a transaction holds its flock now."""
        return flocked(self._flock_file)

    def hold_transaction(self) -> int | None:
        """Take the transaction's flock; the descriptor, or None where another holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._flock_file, flags, PRIVATE_FILE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    @contextmanager
    def hold(
        self, command: str, *, wait: float = 0.0, on_wait: Callable[[str], None] | None = None
    ) -> Iterator[Held]:
        """Hold the token for the body.

        Args:
            command: what is done, shown to others.
            wait: seconds to wait for another holder.
            on_wait: told at once who is waited for and how long yet, then now and then and at each change.

        Raises:
            LockedError: another holder is alive or a transaction runs; the message has holder, age and the
                command to release it.
        """
        held = self._acquire(command, time.monotonic() + wait, on_wait)
        ended = threading.Event()
        beat = threading.Thread(target=self._heartbeat, args=(held.info.token, ended), daemon=True)
        beat.start()
        try:
            yield held
        finally:
            ended.set()
            beat.join()
            self._drop(held.info.token)

    def release(self, token: str) -> LockInfo:
        """Take the token away from its holder.

        Raises:
            ConfigError: nobody holds it, or the token is another one.
            LockedError: a transaction runs, which nothing ends.
        """
        if self.holder() is None:
            raise ConfigError(f"{self._name} is not locked")
        with self._guard():
            info = self.holder()
            if info is None:
                raise ConfigError(f"{self._name} is not locked")
            if info.token != token:
                raise ConfigError(
                    f"{self._name} is locked under another token, by {info.who}",
                    hint=f"ddtoolkit lock show {self._name}",
                )
            if self.transaction_running():
                raise LockedError(
                    f"{self._name}: a transaction is running and ends by itself",
                    hint=f"ddtoolkit status {self._name} shows it",
                )
            self._token_file.unlink(missing_ok=True)
        return info

    def _damaged(self, token: Any) -> LockInfo:
        """What is shown for a token file that names no holder; no host, so it counts as stale."""
        try:
            since = self._token_file.stat().st_mtime
        except OSError:
            since = time.time()
        shown = token if isinstance(token, str) else "damaged"
        return LockInfo(shown, f"nobody known: {self._token_file} is damaged", "unknown", since, None, "")

    def _acquire(self, command: str, end: float, on_wait: Callable[[str], None] | None) -> Held:
        try:
            make_private(self._state)
        except OSError as error:
            raise ToolkitError(f"{self._state}: {error.strerror}") from error
        waiting = Waiting(on_wait)
        while True:
            try:
                return self._try(command)
            except LockedError as error:
                if (left := end - time.monotonic()) <= 0:
                    raise
                waiting.tell(error.message, left)
                time.sleep(min(_POLL, left))

    def _try(self, command: str) -> Held:
        with self._guard():
            info = self.holder()
            taken_over = None
            if info is not None:
                if not self._gone(info):
                    release = f", or: ddtoolkit lock release {info.token} --service {self._name}"
                    running = self.transaction_running()  # which no release of the lock ends
                    raise LockedError(
                        f"{self._name} is locked by {info.who} {info.held()}: {info.command}",
                        hint="wait with --lock-wait" + ("" if running else release),
                    )
                taken_over = info
            if self.transaction_running():
                raise LockedError(
                    f"{self._name}: {self._transaction(info)}",
                    hint=f"watch it with: ddtoolkit status {self._name}",
                )
            self._token_file.unlink(missing_ok=True)
            mine = holder_here(command)
            try:
                token = json_bytes(mine.to_json())
                self._reserve.write("lock", lambda: write_new(self._token_file, token))
            except OSError as error:
                raise ToolkitError(f"{self._token_file}: cannot take the lock: {error.strerror}") from error
            return Held(mine, taken_over)

    def _transaction(self, info: LockInfo | None) -> str:
        """Whose transaction runs, since when and for what; its command may be gone, and its token with it."""
        runs, ends = "is running on the host", "and ends by itself"
        if info is not None:
            return f"a transaction begun by {info.who} ({info.command}, {info.held()}) {runs} {ends}"
        try:
            request = read_request(self._transaction_folder)
        except ToolkitError:
            return f"a transaction {runs} {ends}"
        events = read_journal(self._transaction_folder)
        since = f" {_held(events[0].time)}" if events else ""
        words = f": {request.command}" if request.command else ""
        return f"a {request.kind} of {request.who}, whose command is gone, {runs}{since} {ends}{words}"

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Serialise the look at the token and its replacement."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._guard_file, flags, PRIVATE_FILE)
        except OSError as error:
            said = f"{self._guard_file}: cannot take the lock: {error.strerror}"
            raise ToolkitError(said, hint="run it as the user who deployed the service") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _heartbeat(self, token: str, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT):
            info = self.holder()
            if info is not None and info.token == token:
                with contextlib.suppress(OSError):
                    os.utime(self._token_file, follow_symlinks=False)

    def _drop(self, token: str) -> None:
        with contextlib.suppress(OSError, ToolkitError), self._guard():
            info = self.holder()
            if info is not None and info.token == token:
                self._token_file.unlink(missing_ok=True)


class Waiting:
    """Tells whom a wait is for: at once, when it is another one, and now and then.

    Args:
        tell: called with the line; None tells nobody.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._said, self._when = "", 0.0

    def tell(self, message: str, left: float) -> None:
        """Say it, unless it was said just now.

        Args:
            message: who holds the lock, since when and with what.
            left: seconds until the wait is given up.
        """
        who, now = _AGE.sub("", message), time.monotonic()
        if self._tell is None or (who == self._said and now - self._when < _TELL_EVERY):
            return
        self._said, self._when = who, now
        self._tell(f"{message}; waiting for it, {math.ceil(left)} s at most")


@dataclass(frozen=True, slots=True)
class Held:
    """A token that this process holds.

    Attributes:
        info: what others see.
        taken_over: the stale holder whose token was replaced.
    """

    info: LockInfo
    taken_over: LockInfo | None = None


_identity: list[str] = []


def identify_as(who: str) -> None:
    """Act for someone at another machine: what `whoami` says from now on in this process."""
    _identity[:] = [who]


def whoami() -> str:
    """`user@host`; behind sudo the user who called it; whoever `identify_as` named."""
    if _identity:
        return _identity[0]
    user = os.environ.get("SUDO_USER")
    if not user:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def holder_here(command: str) -> LockInfo:
    """This process as a holder, with a token of its own."""
    process = identify(os.getpid())
    return LockInfo(
        token=secrets.token_hex(8),
        who=f"{whoami()} pid {os.getpid()}",
        command=command,
        since=time.time(),
        process=process.to_json() if process else None,
        host=socket.gethostname(),
    )


def _process_here(info: LockInfo) -> ProcessId | None:
    """The holder's process where that is one of this machine, which may have got another name meanwhile."""
    process = ProcessId.from_json(info.process)
    if process is not None and (info.host == socket.gethostname() or process.boot == boot_id() != ""):
        return process
    return None


def sound(info: LockInfo) -> bool:
    """Whether every value has the type that readers count on."""
    return (
        all(isinstance(text, str) for text in (info.token, info.who, info.command, info.host))
        and isinstance(info.since, int | float)
        and math.isfinite(info.since)
        and isinstance(info.process, dict | None)
    )


def _held(since: float) -> str:
    """Since when, and for how long, for people."""
    try:
        when = f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%SZ}"
    except (OverflowError, ValueError, OSError):
        when = "an unknown time"  # the file was damaged
    return f"since {when} ({in_words(time.time() - since)})"
