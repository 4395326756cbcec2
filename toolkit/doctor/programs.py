"""Asking the host's programs; that one is missing, fails or hangs is a fact, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

LIMIT = 20.0
_MORE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEPT = 8 << 20  # characters of output
_GRACE = 1.0


def ask(argv: Sequence[str], limit: float = LIMIT) -> dict[str, Any]:
    """Run a program in the C locale, in a session of its own, for at most `limit` seconds.

    Returns:
        `out`, `err` (text), `status` (None where it did not end) and `why`: "" where it ended, else
        `missing` or `slow`.
    """
    path = os.environ.get("PATH", "")
    # LANGUAGE comes before LC_ALL for messages (gettext manual, "The LANGUAGE variable").
    environment = os.environ | {"LC_ALL": "C.UTF-8", "LANGUAGE": "", "PATH": f"{path}:{_MORE_PATH}"}
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        return {"out": "", "err": "", "status": None, "why": "missing"}
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(child)
        return {"out": "", "err": "", "status": None, "why": "slow"}
    return {"out": _text(out), "err": _text(err), "status": child.returncode, "why": ""}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill it with what it began; one that sleeps in a driver cannot be killed and is not waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=_GRACE)


def _text(data: bytes) -> str:
    return data[:_KEPT].decode("utf-8", "replace")
