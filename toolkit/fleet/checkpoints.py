"""Asking hosts about their checkpoints, from the control machine; nothing need be installed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import toolkit
from toolkit.errors import ToolkitError, UnreachableError
from toolkit.inventory.host import Host
from toolkit.remote.absence import Absence
from toolkit.remote.agent import run_module
from toolkit.remote.protocol import error_from_json

_MODULE = "toolkit.weights"

Tell = Callable[[dict[str, Any]], None]


def ask(host: Host, verb: str, request: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """The answer of a host to one request (`work`); the connection may break meanwhile.

    Args:
        host: the host.
        verb: what is asked.
        request: the rest of it; it goes through the connection and is in nobody's list of processes.
        tell: called with each message on the way.

    Raises:
        UnreachableError: the host cannot be reached, or was lost for long; a transfer goes on by itself.
        ToolkitError: what went wrong there.
    """
    wanted = {**request, "verb": verb}
    if host.local:
        return _here(host.name, wanted, tell)
    away = Absence()
    heard = False

    def passed(value: dict[str, Any]) -> None:
        nonlocal heard
        heard = True
        away.end()
        tell(value)

    while True:
        try:
            return run_module(host, [_MODULE], passed, wanted)
        except UnreachableError as error:
            if not heard:
                raise  # it was never there
            away.wait(error, "a transfer goes on there by itself", tell)


def _here(name: str, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """The same on this machine, under this interpreter and as this user."""
    environment = os.environ | {"PYTHONPATH": str(Path(toolkit.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        assert child.stdin is not None  # noqa: S101  Popen was told to make both
        assert child.stdout is not None  # noqa: S101
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.close()
        for line in child.stdout:
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise error_from_json({**message, "message": message["error"]}, name)
            if "changed" in message:
                return message
            tell(message)
    raise ToolkitError(f"{name}: {_MODULE} ended with {child.returncode} and no answer")
