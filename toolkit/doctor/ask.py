"""Having hosts examined, from the control machine; nothing need be installed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import toolkit
from toolkit.doctor.examine import examine
from toolkit.doctor.report import Report
from toolkit.errors import ToolkitError
from toolkit.inventory.commands import told
from toolkit.inventory.host import Host

_MODULE = "toolkit.doctor"
_LIMIT = 120.0

Examination = dict[str, Any]


def report_here(examination: Examination) -> Report:
    """What the doctor finds on this machine.

    Args:
        examination: as `toolkit.doctor.request` makes it.
    """
    return examine(examination)


def report_of(host: Host, examination: Examination) -> Report:
    """What the doctor finds on a host.

    Raises:
        UnreachableError: it cannot be reached, or the connection broke.
        ToolkitError: its answer is none.
    """
    if host.local:
        return Report.from_json(told(_in_child(host.name, examination), host))
    from toolkit.remote.agent import run_module

    return Report.from_json(run_module(host, [_MODULE], lambda _: None, examination)["report"])


def _in_child(name: str, examination: Examination) -> dict[str, Any]:
    """On this machine, as a host of an inventory (`ansible_connection: local`)."""
    environment = os.environ | {"PYTHONPATH": str(Path(toolkit.__file__).parents[1])}
    command = [sys.executable, "-P", "-m", _MODULE]
    load = examination.get("load")
    try:
        done = subprocess.run(
            command, input=json.dumps(examination) + "\n", capture_output=True, text=True, env=environment,
            timeout=_LIMIT + (0.0 if load is None else 2 * load["limit"]), check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["report"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        raise ToolkitError(f"{name}: the doctor failed: {error}") from error
    return found
