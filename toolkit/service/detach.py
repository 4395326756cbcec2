"""Leaving the command that asked: a process of its own session that outlives caller and terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

_OK = b"\0"
_START_LIMIT = 30.0


def detach(body: Callable[[Callable[[], None]], None]) -> str:
    """Run `body` in a detached process (setsid(2), forked twice) and wait until it reports.

    The process has "/" as its folder, no terminal, /dev/null on descriptors 0 to 2, and ignores SIGHUP and
    SIGINT. To be called while this process has one thread.

    Args:
        body: gets a function that it calls once, when it has begun for good. What it raises before that is
            returned here as text.

    Returns:
        "" once `body` has reported, else why it never did.
    """
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(read_end)
        os.setsid()
        if os.fork() == 0:
            _run(body, write_end)
        os._exit(0)
    os.wait()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        said = file.read()
    if said == _OK:
        return ""
    return said.decode("utf-8", "replace") or "the detached process ended at once"


def start_module(module: str, *arguments: str) -> str:
    """Run `python -m MODULE ARGUMENTS`, which detaches itself; return why it did not, "" when it did.

    The current folder is kept off the import path (-P): it may be anyone's.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{module} cannot be started: {error}"
    if done.returncode == 0:
        return ""
    return done.stderr.decode("utf-8", "replace").strip() or f"{module} ended with {done.returncode}"


def _run(body: Callable[[Callable[[], None]], None], report: int) -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    reported = False

    def begun() -> None:
        nonlocal reported
        reported = True
        os.write(report, _OK)
        os.close(report)

    status = 1
    try:
        body(begun)
        status = 0
    except BaseException as error:
        if reported:
            raise
        os.write(report, str(error).encode("utf-8", "replace"))
    finally:
        os._exit(status)
