"""Taking a host out of the load balancer around a restart, by commands of the inventory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

from toolkit.errors import EXIT_DONE, ToolkitError
from toolkit.inventory.host import Host
from toolkit.visible import visible

_LIMIT = 600.0
_LOOK = 0.05
_SHOWN = 500  # bytes of what a hook said last
_KEPT = 1 << 20  # bytes at which what it said before those is dropped

# Called with a host's name and a message of its agent's kind.
TellHost = Callable[[str, dict[str, Any]], None]


def exit_code_of(value: Any) -> int:
    """Exit code of what `deploy`, `swap`, `rollback` and the like gave."""
    outcome = (value or {}).get("outcome")
    return EXIT_DONE if outcome is None else int(outcome["exit_code"])


class Balancer:
    """The load balancer as the hosts' hooks reach it, from the control machine and without a shell.

    A hook has a session of its own: what ends this command does not cut it off half-way.

    Attributes:
        out: names of the hosts that were taken out, and not put back since.

    Args:
        tell: called with each step.
    """

    def __init__(self, tell: TellHost) -> None:
        self.out: set[str] = set()
        self._tell = tell

    def drained(self, host: Host, change: Callable[[], Any], serves: Callable[[], bool]) -> Any:
        """Make a change with the host drained; it is put back if it serves afterwards, however it went.

        Args:
            host: the host.
            change: makes the change and gives its result.
            serves: whether the service answers now.

        Raises:
            ToolkitError: a hook failed, or the change did; says so where the host stays drained.
        """
        self._drain(host, serves)
        try:
            value = change()
        except ToolkitError as error:
            if self._put_back(host, serves):
                raise
            error.message += f" ({host.name} stays drained)"
            error.args = (error.message,)
            raise
        if not self._put_back(host, serves):
            self._tell(host.name, {"step": ["drained", "it stays drained, since it does not serve"]})
        return value

    def undrained(self, host: Host, change: Callable[[], Any], serves: Callable[[], bool]) -> Any:
        """Make a change that may begin the service, and put the host back if it serves afterwards.

        Arguments and errors as `drained`.
        """
        value = change()
        self._put_back(host, serves)
        return value

    def _drain(self, host: Host, serves: Callable[[], bool]) -> None:
        if host.drain is None:
            return
        self.out.add(host.name)
        try:
            self._run(host, "drain", host.drain)
        except _HungError as error:
            error.message += self._after_hang(host, serves)
            error.args = (error.message,)
            raise
        except ToolkitError:
            self.out.discard(host.name)
            raise

    def _after_hang(self, host: Host, serves: Callable[[], bool]) -> str:
        """Put a host back whose drain came no one knows how far; what came of that."""
        try:
            back = host.undrain is not None and self._put_back(host, serves)
        except ToolkitError as error:
            return f"; {error.message}"
        return "; it was put back" if back else "; it may be drained, and stays so"

    def _put_back(self, host: Host, serves: Callable[[], bool]) -> bool:
        """Undrain a host that serves; whether it is in the load balancer now."""
        if host.drain is None and host.undrain is None:
            return True
        if not serves():
            return False
        self.out.discard(host.name)  # it goes on by itself, whatever ends this command
        try:
            if host.undrain is not None:
                self._run(host, "undrain", host.undrain)
        except ToolkitError:
            self.out.add(host.name)
            raise
        return True

    def _run(self, host: Host, name: str, command: tuple[str, ...]) -> None:
        self._tell(host.name, {"step": [name, " ".join(command)]})
        # A file, not a pipe: what a hook leaves running in the background may keep that open for ever.
        try:
            with tempfile.TemporaryFile() as said:
                try:
                    status = _status(command, said)
                except subprocess.TimeoutExpired:
                    reason = f"did not end within {_LIMIT:g} s, and was killed{_last(said)}"
                    raise _failed(host, name, command, reason, _HungError) from None
                if status != 0:
                    raise _failed(host, name, command, f"ended with status {status}{_last(said)}")
        except (OSError, ValueError) as error:  # ValueError: no program can be given such an argument
            raise _failed(host, name, command, str(error)) from error


class _HungError(ToolkitError):
    """A hook was killed at the end of its time."""


def _status(command: tuple[str, ...], said: IO[bytes]) -> int:
    """How a hook ended; what it said goes into a file.

    Raises:
        OSError: it cannot be run.
        ValueError: an argument has a zero byte, or is no text.
        subprocess.TimeoutExpired: it did not end, and was killed with all that it began.
    """
    # Where the file's end is now, since it is shortened.
    fcntl.fcntl(said, fcntl.F_SETFL, fcntl.fcntl(said, fcntl.F_GETFL) | os.O_APPEND)
    end = time.monotonic() + _LIMIT
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
    ) as hook:
        while True:
            try:
                return hook.wait(_LOOK)
            except subprocess.TimeoutExpired:
                _shorten(said)
                if time.monotonic() < end:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(hook.pid, signal.SIGKILL)
                raise


def _shorten(said: IO[bytes]) -> None:
    """Keep what is shown of what a hook says: one that says it without end would fill the disk."""
    if os.fstat(said.fileno()).st_size > _KEPT:
        text = _tail(said)
        os.ftruncate(said.fileno(), 0)
        os.write(said.fileno(), text)


def _tail(said: IO[bytes]) -> bytes:
    size = os.fstat(said.fileno()).st_size
    return os.pread(said.fileno(), _SHOWN, max(size - _SHOWN, 0))


def _last(said: IO[bytes]) -> str:
    """What a hook said last, behind a colon, without what a terminal would obey."""
    text = visible(_tail(said).decode("utf-8", "replace").strip())
    return f": {text}" if text else ""


def _failed(
    host: Host, name: str, command: tuple[str, ...], reason: str, kind: type[ToolkitError] = ToolkitError
) -> ToolkitError:
    before = "; nothing was changed there" if name == "drain" else "; it serves, but stays drained"
    return kind(
        f"{host.name}: ddtoolkit_{name}: {command[0]}: {reason}{before}",
        hint="mend the command in the inventory",
    )
