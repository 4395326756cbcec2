"""Long work in a transient unit of a fixed name (systemd-run(1)), and watching it from any connection."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.service.systemctl import command, said
from toolkit.service.transient import python_environment

_POLL = 0.2
_BEAT = 5.0
_BOOTED = Path("/run/systemd/system")  # sd_booted(3)
_STATES = ("active", "activating", "deactivating", "reloading")

Tell = Callable[[dict[str, Any]], None]


def may_detach() -> bool:
    """Whether this machine's systemd can run units for us."""
    return _BOOTED.is_dir() and os.geteuid() == 0


def watch(
    name: str,
    arguments: Sequence[str],
    state: Path,
    tell: Tell,
    *,
    module: str,
    what: str,
) -> int:
    """Start the work in the unit of that name, unless it runs already, and tell its lines to its end.

    Args:
        name: what is made; the unit and its log are named after it.
        arguments: of `python -m MODULE`.
        state: folder of the log.
        tell: called with every line of the log.
        module: what is run.
        what: is done, in words, for the unit's description.

    Returns:
        0, or 1 where the work failed.

    Raises:
        ToolkitError: the unit cannot be started, or ended without a word.
    """
    unit = f"ddtoolkit-{name}.service"
    state.mkdir(parents=True, exist_ok=True)
    log = state / f"{name}.log"
    if not _runs(unit):
        log.unlink(missing_ok=True)
        _start(unit, what, module, arguments, log)
    last = _follow(unit, log, tell)
    if not {"changed", "error"} & last.keys():
        raise ToolkitError(f"{unit} ended without a result", hint=f"journalctl -u {unit}; then run it again")
    return 1 if "error" in last else 0


def _start(unit: str, what: str, module: str, arguments: Sequence[str], log: Path) -> None:
    words = ["--quiet", "--collect", f"--unit={unit}", f"--description=ddtoolkit: {what}"]
    words += [f"--property=StandardOutput=append:{log}", "--property=Type=exec"]
    words += [f"--setenv={key}={value}" for key, value in python_environment().items()]
    words += ["--", sys.executable, "-P", "-m", module, *arguments]
    done = command("systemd-run", "--no-ask-password", *words, limit=60.0)
    # Another connection may have been quicker.
    if done.returncode != 0 and not _runs(unit):
        raise ToolkitError(f"{unit} cannot be started: {said(done)}")


def _follow(unit: str, log: Path, tell: Tell) -> dict[str, Any]:
    """Tell what is written, and now and then that it goes on, until the unit has ended; the last object."""
    last: dict[str, Any] = {}
    read = b""
    position = 0
    told = time.monotonic()
    while True:
        running = _runs(unit)
        try:
            with log.open("rb") as file:
                file.seek(position)
                piece = file.read()
        except FileNotFoundError:
            piece = b""
        position += len(piece)
        read += piece
        *lines, read = read.split(b"\n")
        for line in lines:
            last = _object(line) or last
            tell(last)
        if not running:
            return last
        if lines:
            told = time.monotonic()
        elif time.monotonic() - told > _BEAT:
            told = time.monotonic()
            tell({"beat": 1})  # pip says nothing for minutes; whoever listens would take this host for lost
        time.sleep(_POLL)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _runs(unit: str) -> bool:
    shown = command("systemctl", "show", "--property=ActiveState", "--value", unit, limit=30.0)
    return shown.stdout.strip() in _STATES
