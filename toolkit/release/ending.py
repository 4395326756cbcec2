"""How a transaction ends: commit, record, prune."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files import read_json
from toolkit.release import history
from toolkit.release.experiment import Experiment, read_experiment, write_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.judge import uncounted
from toolkit.release.request import Outcome, Request, Status
from toolkit.release.spawn import spawn_timer
from toolkit.release.steps import Steps
from toolkit.release.store import PENDING_FILE, REFUSED_FILE, Release
from toolkit.service import ports
from toolkit.service.readiness import generate_once
from toolkit.service.secrets import stored_secrets
from toolkit.service.unit import Unit

_PROBE_LIMIT = 5.0
_MAX_TOLD = 300  # characters of a check


TEST_REPORT_FILE = "test-report.json"


def require_free(unit: Unit) -> None:
    """Make sure that the unit's port can be bound.

    Raises:
        ToolkitError: it is in use; names who holds it.
    """
    if why := ports.busy(unit.host, unit.port):
        raise ToolkitError(why, hint="stop what holds it, or set another service.port")


def commit(host: ServiceHost, request: Request, release: Release) -> None:
    """Keep the acceptance report with the release and begin the time of an experiment; may be repeated.

    Raises:
        ToolkitError: an experiment cannot be timed.
        OSError: the disk is full or failing.
    """
    release.keep_report(new_baseline=request.new_baseline)
    if request.kind != "experiment":
        return
    if request.base is None or request.experiment_seconds is None:
        raise ToolkitError("an experiment needs a release to return to and a time")
    now = time.time()
    experiment = Experiment(
        release=release.id,
        base=request.base,
        who=request.who,
        started=now,
        until=now + request.experiment_seconds,
        keep_releases=request.keep_releases,
        base_acceptance=request.base_acceptance,
    )
    write_experiment(host.paths, experiment)
    spawn_timer(host)


@dataclass(frozen=True, slots=True)
class Words:
    """What is said of an end: how it ended, why it did not come to what was asked for, the next step."""

    message: str
    reason: str = ""
    hint: str | None = None


def end(host: ServiceHost, request: Request, steps: Steps, status: Status, words: Words) -> Outcome:
    """Record the outcome in the history and, last of all, in the journal."""
    report = _settle_report(host, request, status)
    seconds = {**steps.seconds, "total": steps.total()}
    outcome = Outcome(
        status=status,
        message=words.message,
        reason=words.reason,
        kind=request.kind,
        release=request.release,
        base=request.base,
        serving=_serving(host, status),
        seconds=seconds,
        log=() if status == "committed" else steps.log,
        hint=words.hint,
        report=report,
        transaction=request.id,
        uncounted=_uncounted(request, status, report),
    )
    if request.recorded:
        _record(host, request, steps, outcome)
    with contextlib.suppress(OSError):
        host.store.forget_switches()
    steps.end(words.message, outcome.to_json())
    return outcome


def end_record(host: ServiceHost, request: Request, message: str, begin: float) -> Outcome:
    """The end of a change of which the server felt nothing, and which took no transaction; in the history.

    Args:
        host: the service.
        request: what was asked for, of kind `record`.
        message: how it ended.
        begin: when it was begun, by the monotonic clock.

    Raises:
        ToolkitError: it is done, but the history cannot be written.
    """
    outcome = Outcome(
        status="committed",
        message=message,
        kind=request.kind,
        release=request.release,
        base=request.base,
        serving=request.release if host.process_status().active else None,
        seconds={"total": round(time.monotonic() - begin, 3)},
        transaction=request.id,
    )
    try:
        history.append(host.paths, history.entry_of(request, outcome))
    except ToolkitError as error:
        raise ToolkitError(f"{message}, but {error.message}", hint=error.hint) from error
    return outcome


def _uncounted(request: Request, status: Status, report: str | None) -> tuple[str, ...]:
    """What failed in the report of an experiment that runs; cut, since the history's space is limited."""
    if (request.kind, status) != ("experiment", "committed") or report is None:
        return ()
    return tuple(text[:_MAX_TOLD] for text in uncounted(read_json(Path(report))))


def _serving(host: ServiceHost, status: Status) -> str | None:
    """What serves now; where no step has just seen a token, one is asked for."""
    process = host.process_status()
    if not process.active or process.release is None:
        return None
    if status in ("committed", "rolled_back"):
        return process.release
    try:
        unit = host.store.get(process.release).unit
    except ToolkitError:
        return process.release  # it runs, and nothing says where to ask for a token
    key = stored_secrets(unit).get("api-key")
    return process.release if generate_once(unit.url, _PROBE_LIMIT, api_key=key) == "" else None


def prune(host: ServiceHost, request: Request) -> None:
    """Remove old releases and their secrets, never what serves or may be returned to."""
    experiment = read_experiment(host.paths)
    current = host.store.current()
    protect = {
        request.release,
        request.base,
        experiment.base if experiment else None,
        current.id if current else None,
    }
    with contextlib.suppress(OSError):
        for removed in host.store.prune(request.keep_releases, {item for item in protect if item}):
            host.secrets_file(removed).unlink(missing_ok=True)


def _settle_report(host: ServiceHost, request: Request, status: Status) -> str | None:
    """Name the report by what it came to; renaming takes no space on the disk."""
    if request.release is None or request.acceptance is None:
        return None
    folder = host.store.path(request.release)
    if request.kind == "test":
        # The report that the release was accepted with stays what later releases are held against.
        path = host.paths.state / TEST_REPORT_FILE
        with contextlib.suppress(OSError):
            (folder / PENDING_FILE).replace(path)
        return str(path) if path.is_file() else None
    if status == "committed":
        path = Release(request.release, folder).report_file
    else:
        path = folder / REFUSED_FILE
        with contextlib.suppress(OSError):
            (folder / PENDING_FILE).replace(path)
    return str(path) if isinstance(read_json(path), dict) else None


def _record(host: ServiceHost, request: Request, steps: Steps, outcome: Outcome) -> None:
    if any(entry.id == outcome.transaction for entry in history.read(host.paths)):
        return
    try:
        history.append(host.paths, history.entry_of(request, outcome))
    except ToolkitError as error:
        steps.note("history", error.message)
