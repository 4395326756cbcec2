"""A unit's lines in systemd's journal."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from typing import IO

from toolkit.errors import ToolkitError
from toolkit.service.systemctl import command

_LIMIT = 20.0
_POLL = 0.2


def tail(unit: str, lines: int, *, since: float | None = None) -> list[str]:
    """The last `lines` lines of `unit`, systemd's own about it among them.

    Args:
        unit: name of the unit.
        lines: how many.
        since: only lines from this time on, seconds since the epoch.
    """
    # Newest first: with a beginning in time it would take the first lines, not the last.
    arguments = [*_arguments(unit, lines), "--reverse"]
    if since is not None:
        arguments.append(f"--since=@{since:.6f}")
    try:
        command("journalctl", "--sync", limit=_LIMIT)  # what the server wrote last may still be on its way
        done = command("journalctl", *arguments, limit=_LIMIT)
    except ToolkitError as error:
        return [error.message]
    return done.stdout.splitlines()[::-1]


def follow(unit: str, lines: int, *, ended: Callable[[], bool]) -> Iterator[str]:
    """The last `lines` lines of `unit`, then each further one; `ended` is asked when nothing new is there.

    Raises:
        ToolkitError: journalctl cannot be run.
    """
    words = ["journalctl", "--follow", *_arguments(unit, lines)]
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(words, stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError as error:
        raise ToolkitError(f"journalctl cannot be run: {error.strerror}") from error
    assert process.stdout is not None  # noqa: S101 - it was asked for
    try:
        yield from _lines(process.stdout, ended)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _lines(output: IO[bytes], ended: Callable[[], bool]) -> Iterator[str]:
    rest = b""
    with contextlib.closing(selectors.DefaultSelector()) as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if not selector.select(_POLL):
                if ended():
                    return
                continue
            block = os.read(output.fileno(), 1 << 16)
            *whole, rest = (rest + block).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
            if not block:
                return


def _arguments(unit: str, lines: int) -> list[str]:
    return [f"--unit={unit}", f"--lines={lines}", "--output=cat", "--no-pager", "--quiet"]
