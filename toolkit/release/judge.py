"""Runs the acceptance program against what was started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.files import read_json
from toolkit.release.request import Acceptance
from toolkit.service.processes import end_with_parent, signal_name
from toolkit.service.secrets import stored_secrets
from toolkit.service.unit import Unit, seconds

_KEPT_LINES = 10
_GRACE = 1.0
_MAX_LINE = 65536
_MAX_TOLD = 500  # characters of a line that go into a message; the history has limited space
ACCEPTED, REFUSED = 0, 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the acceptance program came to.

    Attributes:
        accepted: it ended with status 0 and wrote a report.
        message: its reasons, or why there is no verdict.
        report: the JSON object it wrote.
    """

    accepted: bool
    message: str
    report: dict[str, Any] | None = None

    @property
    def hint(self) -> str | None:
        """The next step, where the release is right and no more than worse than the one before."""
        report = self.report or {}
        if self.accepted or report.get("correctness_failed", True) or not report.get("performance_failed"):
            return None
        return (
            "where the loss is meant, the same command with --new-baseline, which holds it against the "
            "profile's own thresholds alone"
        )


def uncounted(report: Any) -> tuple[str, ...]:
    """What failed in an experiment's report and refused nothing: each check, and how, in words.

    Args:
        report: as the acceptance program wrote it.
    """
    if not isinstance(report, dict) or report.get("mode") != "experiment":
        return ()
    checks = report.get("checks")
    listed = [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []
    return tuple(
        f"{check.get('name')}: {check.get('detail') or 'failed'}"
        for check in listed
        if (check.get("status"), check.get("category")) == ("failed", "performance")
    )


def judge(
    acceptance: Acceptance,
    unit: Unit,
    *,
    settings: Path,
    out: Path,
    on_progress: Callable[[Any], None],
) -> Verdict:
    """Run the program to its end or its time limit.

    Args:
        acceptance: the program.
        unit: unit of the release that is judged.
        settings: the settings file, already written.
        out: where the report goes.
        on_progress: called with each JSON line of its standard output.
    """
    out.unlink(missing_ok=True)
    command = [*acceptance.command, "--settings", str(settings), "--out", str(out)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(unit),
            start_new_session=True,
            # Else it would go on loading the server after a transaction that was killed and undone.
            preexec_fn=end_with_parent(),  # noqa: PLW1509 - it takes no lock that a thread may hold
        )
    except OSError as error:
        return Verdict(False, f"acceptance cannot be run: {command[0]}: {error.strerror}")
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(acceptance.time_limit, expire)
    timer.daemon = True
    timer.start()
    said: deque[str] = deque(maxlen=_KEPT_LINES)
    reader = threading.Thread(target=_read, args=(process, on_progress, said), daemon=True)
    reader.start()
    status = process.wait()
    timer.cancel()
    reader.join(_GRACE)  # what it left running may hold its output open
    if expired.is_set():
        return Verdict(False, f"acceptance did not end within {seconds(acceptance.time_limit)}")
    return _verdict(status, read_json(out), list(said))


def _read(process: subprocess.Popen[bytes], on_progress: Callable[[Any], None], said: deque[str]) -> None:
    assert process.stdout is not None  # noqa: S101 - it was asked for
    with process.stdout as output:
        while line := output.readline(_MAX_LINE):
            _take(line, on_progress, said)


def _take(line: bytes, on_progress: Callable[[Any], None], said: deque[str]) -> None:
    text = line.decode("utf-8", "replace").strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        on_progress(value)
    elif text:
        said.append(text)


def _verdict(status: int, report: Any, said: list[str]) -> Verdict:
    if not isinstance(report, dict):
        report = None
    if status == ACCEPTED and report is not None:
        return Verdict(True, "accepted", report)
    if status == REFUSED and report is not None:
        reasons = report.get("reasons")
        words = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
        return Verdict(False, f"acceptance refused it: {words or 'see the report'}", report)
    how = f"status {status}" if status >= 0 else signal_name(-status)
    tail = f": {said[-1][:_MAX_TOLD]}" if said else ""
    missing = "" if report is not None else " without a report"
    return Verdict(False, f"acceptance ended with {how}{missing}{tail}", report)


def _environment(unit: Unit) -> dict[str, str]:
    keys = {"api-key": "DDTOOLKIT_API_KEY", "admin-api-key": "DDTOOLKIT_ADMIN_API_KEY"}
    stored = stored_secrets(unit)
    return {**os.environ, **{keys[key]: value for key, value in stored.items() if key in keys}}
