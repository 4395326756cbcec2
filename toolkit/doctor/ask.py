"""Asking hosts for their facts, from the control machine; nothing need be installed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import toolkit
from toolkit.doctor.collect import collect
from toolkit.errors import ToolkitError
from toolkit.inventory.host import Host

_MODULE = "toolkit.doctor"
_LIMIT = 120.0


def facts_here(request: dict[str, Any]) -> dict[str, Any]:
    """The facts of this machine."""
    return collect(request)


def facts_of(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    """The facts of a host.

    Raises:
        UnreachableError: it cannot be reached, or the connection broke.
        ToolkitError: its answer is none.
    """
    if host.local:
        return _in_child(host.name, request)
    from toolkit.remote.agent import run_module

    facts: dict[str, Any] = run_module(host, [_MODULE], lambda _: None, request)["facts"]
    return facts


def _in_child(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """On this machine, as a host of an inventory (`ansible_connection: local`)."""
    environment = os.environ | {"PYTHONPATH": str(Path(toolkit.__file__).parents[1])}
    command = [sys.executable, "-P", "-m", _MODULE]
    try:
        done = subprocess.run(
            command, input=json.dumps(request) + "\n", capture_output=True, text=True, env=environment,
            timeout=_LIMIT, check=True,
        )  # fmt: skip
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["facts"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        raise ToolkitError(f"{name}: the doctor's collector failed: {error}") from error
    return facts
