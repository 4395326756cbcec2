"""Programs in units of their own (systemd-run), so that the end of the caller's session does not end them."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.service.systemctl import command, said

_START_LIMIT = 30.0
_WAIT_LIMIT = 300.0
# What the same program needs in order to run as it runs here; nothing else of the caller's is handed on,
# since everyone may read a unit's environment.
_HANDED_ON = ("PATH", "LANG", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


def python_environment() -> dict[str, str]:
    """The variables that decide which code a Python of ours runs."""
    return {name: os.environ[name] for name in _HANDED_ON if name in os.environ}


def start_module(unit: str, description: str, module: str, *arguments: str, after: Sequence[str] = ()) -> str:
    """Run `python -m MODULE ARGUMENTS`, which detaches itself, in a system unit of its own.

    Args:
        unit: beginning of the unit's name; what makes it unique is added.
        description: one line for people.
        module: name of the module.
        arguments: its arguments.
        after: units that are stopped only after this one when the machine goes down.

    Returns:
        Why it did not detach itself, "" when it did.
    """
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-start-") as folder:
        errors = Path(folder) / "stderr"
        properties = ["Type=forking", f"TimeoutStartSec={_START_LIMIT:g}", f"StandardError=file:{errors}"]
        properties += [f"After={name}" for name in after]
        why = start_program(unit, description, module, *arguments, properties=properties)
        return why and (_text(errors) or why)


def start_program(
    unit: str, description: str, module: str, *arguments: str, properties: Sequence[str] = ("Type=exec",)
) -> str:
    """Run `python -m MODULE ARGUMENTS` in a system unit of its own; why it could not be started, or "".

    Args:
        unit: beginning of the unit's name; what makes it unique is added.
        description: one line for people.
        module: name of the module.
        arguments: its arguments.
        properties: of the unit.
    """
    words = ["--quiet", "--collect", f"--unit={unit}.{secrets.token_hex(4)}.service"]
    words += [f"--description={description}", *(f"--property={item}" for item in properties)]
    words += [f"--setenv={name}={value}" for name, value in python_environment().items()]
    words += ["--", sys.executable, "-P", "-m", module, *arguments]
    try:
        done = command("systemd-run", "--no-ask-password", *words, limit=_WAIT_LIMIT)
    except ToolkitError as error:
        return error.message
    return "" if done.returncode == 0 else said(done)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
