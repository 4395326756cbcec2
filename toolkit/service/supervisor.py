"""Supervisor of one served process: `python -m toolkit.service.supervisor FOLDER RELEASE`.

Leaves the caller's session (setsid(2), forked twice), so it survives the command and its terminal; it does
not survive a reboot. It starts the unit's program, captures its output into a rotated log, restarts it on
failure by the unit's policy, and on SIGTERM stops it: SIGTERM to the process group, SIGKILL after the stop
timeout to whatever is left. As a child subreaper (PR_SET_CHILD_SUBREAPER, prctl(2)) it also finds processes
that left the group or lost their parent.

Files in FOLDER: `supervisor.lock` (flock: one supervisor a service) and `status` (see `process.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import resource
import secrets
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import PRIVATE_FILE, Record, make_private
from toolkit.service.detach import detach
from toolkit.service.leftovers import COOKIE, find_leftovers, kill_all
from toolkit.service.logfile import RotatingLog
from toolkit.service.manager import Leftover, State
from toolkit.service.processes import identify, signal_name
from toolkit.service.supervision import STATUS_FILE, Supervision
from toolkit.service.unit import Unit, read_unit

LOCK_FILE = "supervisor.lock"
START_NOTE = "starting release"
_GRACE = 1.0
_POLL = 0.05
_READS = 64
_PR_SET_CHILD_SUBREAPER = 36


def service_environment(unit: Unit, cookie: str) -> dict[str, str]:
    """The environment of the served process: what the unit says, and nothing of the caller's but PATH."""
    base = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
    return {**base, **unit.environment, COOKIE: cookie}


class Supervisor:
    """Runs one unit until it is stopped or may not be restarted any more."""

    def __init__(self, unit: Unit, folder: Path) -> None:
        self._unit = unit
        self._log = RotatingLog(Path(unit.log), unit.log_max_size)
        self._record = Record(folder / STATUS_FILE)
        self._selector = selectors.DefaultSelector()
        self._starts: deque[float] = deque()
        self._pid: int | None = None
        self._output: int | None = None
        self._cookie = ""
        self._restarts = 0
        self._stop_asked = False
        self._last_exit: tuple[int | None, str | None] = (None, None)
        self._limits = [
            (getattr(resource, f"RLIMIT_{name.upper()}"), resource.RLIM_INFINITY if value is None else value)
            for name, value in unit.limits.items()
        ]
        self._listen()

    def _listen(self) -> None:
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._selector.register(wake_read, selectors.EVENT_READ)

    def note(self, message: str) -> None:
        """Put a line of the supervisor's own into the log."""
        self._log.note(message)

    def start(self) -> None:
        """Start the program.

        Raises:
            OSError: it cannot be executed.
        """
        self._cookie = secrets.token_hex(16)
        self._starts.append(time.monotonic())
        read_end, write_end = os.pipe()
        try:
            child = subprocess.Popen(
                self._unit.argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                cwd=self._unit.working_directory,
                env=service_environment(self._unit, self._cookie),
                start_new_session=True,
                preexec_fn=self._set_limits,  # noqa: PLW1509 - this process has one thread
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self._output = read_end
        self._selector.register(read_end, selectors.EVENT_READ)
        self._pid = child.pid
        child.returncode = 0  # its end is collected here, with everything else this process adopts
        self._write("running", "running")

    def run(self) -> None:
        """Supervise until the service is stopped or failed for good."""
        while not self._stop_asked:
            self._wait(None)
            ended = self._collect()
            if ended is None:
                continue
            if not self._restart_after(ended):
                return
        self._stop()

    def _on_term(self, *_: Any) -> None:
        self._stop_asked = True

    def _wait(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fd == self._output:
                self._drain()
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)

    def _drain(self) -> None:
        if self._output is None:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS):  # a flood of output must not keep it from its other duties
                data = os.read(self._output, 1 << 16)
                if not data:
                    self._close_output()
                    return
                self._log.write(data)

    def _close_output(self) -> None:
        if self._output is not None:
            self._selector.unregister(self._output)
            os.close(self._output)
            self._output = None

    def _collect(self) -> int | None:
        """Wait status of the main process if it ended; adopted processes are collected on the way."""
        main: int | None = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    main = status
        if main is not None:
            self._pid = None
            self._drain()
        return main

    def _restart_after(self, status: int) -> bool:
        """Handle the end of the main process; return whether it runs again or a stop was asked meanwhile."""
        said = self._ended(status)
        killed, left = kill_all(self._cookie, below=os.getpid(), limit=self._unit.kill_wait)
        if killed:
            self._log.note("killed what outlived the server: " + ", ".join(map(str, killed)))
        self._close_output()
        if left:
            self._finish(
                "failed", f"{said}; not restarted: {_names(left)} could not be killed", leftovers=tuple(left)
            )
            return False
        if self._last_exit[0] == 0:
            self._finish("stopped", f"{said} by itself")
            return False
        return self._start_again(said)

    def _start_again(self, said: str) -> bool:
        policy = self._unit.restart
        while True:
            now = time.monotonic()
            while self._starts and self._starts[0] <= now - policy.interval:
                self._starts.popleft()
            if len(self._starts) >= max(policy.burst, 1):
                limit = f"started {len(self._starts)} times within {policy.interval:g} s"
                self._finish("failed", f"{said}; not started again: {limit}")
                return False
            self._log.note(f"{said}; starting again in {policy.delay:g} s")
            self._write("starting", said)
            end = now + policy.delay
            while not self._stop_asked and (left := end - time.monotonic()) > 0:
                self._wait(left)
                self._collect()
            if self._stopping():
                return True
            self._restarts += 1
            try:
                self.start()
            except OSError as error:
                said = f"cannot start {self._unit.argv[0]}: {error.strerror}"
            else:
                return True

    def _stopping(self) -> bool:
        return self._stop_asked

    def _ended(self, status: int) -> str:
        if os.WIFSIGNALED(status):
            name = signal_name(os.WTERMSIG(status))
            self._last_exit = (None, name)
            said = f"the server was ended by {name}"
        else:
            self._last_exit = (os.WEXITSTATUS(status), None)
            said = f"the server ended with status {os.WEXITSTATUS(status)}"
        self._log.note(said)
        return said

    def _stop(self) -> None:
        begin = time.monotonic()
        self._log.note("stopping the server")
        self._write("running" if self._pid else "starting", "stopping")
        self._terminate(begin + self._unit.stop_timeout)
        self._outlivers(min(begin + self._unit.stop_timeout, time.monotonic() + _GRACE))
        killed, left = kill_all(self._cookie, below=os.getpid(), limit=self._unit.kill_wait)
        self._collect()
        self._close_output()
        message = f"stopped in {time.monotonic() - begin:.1f} s"
        if killed:
            message += f"; killed what outlived the server: {_names(killed)}"
        if left:
            message += f"; still running and not to be killed: {_names(left)}"
        self._finish(
            "failed" if left else "stopped",
            message,
            leftovers=tuple(left),
            killed=tuple(killed),
            asked_to_stop=True,
        )

    def _terminate(self, end: float) -> None:
        """SIGTERM to the group, then SIGKILL to the main process at `end`."""
        pid = self._pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGTERM)
        if self._wait_end(end):
            return
        self._log.note(f"the server did not end within {self._unit.stop_timeout:g} s of SIGTERM: SIGKILL")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        self._wait_end(time.monotonic() + self._unit.kill_wait)

    def _wait_end(self, end: float) -> bool:
        """Wait for the end of the main process, at most until `end`; return whether it came."""
        while True:
            status = self._collect()
            if status is not None:
                self._ended(status)
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._wait(left)

    def _outlivers(self, end: float) -> None:
        """Give what got SIGTERM with the main process until `end` to go by itself."""
        while time.monotonic() < end and find_leftovers(self._cookie, below=os.getpid()):
            self._wait(_POLL)
            self._collect()

    def _finish(self, state: State, message: str, **found: Any) -> None:
        self._log.note(message)
        self._write(state, message, **found)
        self._log.close()

    def _write(self, state: State, message: str, **found: Any) -> None:
        """Put the state on record; `found` are further fields of `Supervision`."""
        supervision = Supervision(
            state=state,
            message=message,
            since=time.time(),
            release=self._unit.release,
            cookie=self._cookie,
            supervisor=identify(os.getpid()),
            process=identify(self._pid) if self._pid else None,
            restarts=self._restarts,
            exit_status=self._last_exit[0],
            exit_signal=self._last_exit[1],
            **found,
        )
        supervision.write(self._record)

    def _set_limits(self) -> None:
        for which, wanted in self._limits:
            _, hard = resource.getrlimit(which)
            # Raising the hard limit takes CAP_SYS_RESOURCE; without it the hard limit is as far as it goes.
            try:
                resource.setrlimit(which, (wanted, wanted))
            except (ValueError, OSError):
                resource.setrlimit(which, (hard, hard))


def _names(items: list[Leftover]) -> str:
    return ", ".join(map(str, items))


def _hold_lock(folder: Path) -> int:
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ToolkitError("the service runs already") from None
    return fd


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _supervise(unit: Unit, folder: Path, begun: Callable[[], None]) -> None:
    """Body of the detached process."""
    lock = _hold_lock(folder)
    try:
        _become_subreaper()
        supervisor = Supervisor(unit, folder)
        supervisor.note(f"{START_NOTE} {unit.release}")
        supervisor.start()
    except OSError as error:
        raise ToolkitError(f"cannot start {error.filename or unit.argv[0]}: {error.strerror}") from error
    begun()
    try:
        supervisor.run()
    except Exception:
        RotatingLog(Path(unit.log), unit.log_max_size).note("supervisor failed\n" + traceback.format_exc())
        raise
    finally:
        os.close(lock)


def main() -> int:
    """Start the supervisor in the background; exit status 0 once the served program has been executed."""
    parser = argparse.ArgumentParser(prog="toolkit.service.supervisor")
    parser.add_argument("folder", type=Path, help="folder of the supervisor's records")
    parser.add_argument("release", type=Path, help="folder of the release whose unit is run")
    options = parser.parse_args()
    try:
        unit = read_unit(options.release)
        make_private(options.folder)
        make_private(Path(unit.cache))
        Path(unit.log).parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    except ToolkitError as error:
        sys.stderr.write(error.message)
        return 1
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}")
        return 1
    if why := detach(lambda begun: _supervise(unit, options.folder, begun)):
        sys.stderr.write(why)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
