"""The acceptance run: every check in order, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.acceptance.checks import CHECKS, Check
from toolkit.acceptance.endpoint import Endpoint
from toolkit.acceptance.exchange import EndpointError, TimeUpError
from toolkit.acceptance.figures import describe_server, figures_of
from toolkit.acceptance.prompts import load_prompts
from toolkit.acceptance.report import Report, judge
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session
from toolkit.acceptance.settings import Settings
from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.secrets import resolve_secret

Progress = Callable[[dict[str, Any]], None]


def run_acceptance(
    settings: Settings, on_progress: Progress | None = None, *, keys: Mapping[str, str] | None = None
) -> Report:
    """Run every check that the server allows.

    Args:
        settings: what to do; see `settings_for` for a profile's.
        on_progress: called with one JSON-safe event before and after each check.
        keys: values of `api_key` and `admin_api_key` that are known; others are read where the settings say.

    Returns:
        The report. A server that does not answer, or stops doing so, is a refusal, not an exception.

    Raises:
        ConfigError: the settings cannot be used: prompts, keys or URL.
    """
    tell = on_progress or (lambda _: None)
    started, clock = datetime.now(UTC), time.monotonic()
    with open_session(settings, keys) as session:
        results, fault = _run_checks(session, tell)
        verdict, reasons, correctness, performance = judge(
            results,
            required=settings.required,
            experiment=settings.mode == "experiment",
            fault=fault,
        )
        report = Report(
            verdict=verdict,
            reasons=reasons,
            correctness_failed=correctness,
            performance_failed=performance,
            mode=settings.mode,
            level=settings.level,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
            server=describe_server(session),
            checks=tuple(results),
            prompts={"count": len(session.texts), "sha256": session.prompts_hash},
            load={
                "requests": settings.requests,
                "concurrency": settings.concurrency,
                "tokens": settings.load_tokens,
                "compared_tokens": settings.max_new_tokens,
            },
            **figures_of(session),
        )
    tell({"event": "verdict", "verdict": report.verdict, "reasons": list(report.reasons)})
    return report


@contextmanager
def open_session(settings: Settings, keys: Mapping[str, str] | None = None) -> Iterator[Session]:
    """A session with its prompts, keys and time limit; nothing is sent yet.

    Raises:
        ConfigError: the settings cannot be used: prompts, keys or URL.
    """
    prompts = load_prompts(None if settings.prompts is None else Path(settings.prompts))
    with _endpoint(settings, time.monotonic(), keys or {}) as endpoint:
        yield Session(endpoint, settings, prompts)


def _endpoint(settings: Settings, clock: float, known: Mapping[str, str]) -> Endpoint:
    keys = {
        name: known.get(name) or (None if reference is None else resolve_secret(reference).reveal())
        for name, reference in (("api_key", settings.api_key), ("admin_api_key", settings.admin_api_key))
    }
    try:
        return Endpoint(
            settings.url,
            **keys,
            request_timeout=settings.request_timeout,
            deadline=clock + settings.time_limit,
        )
    except ToolkitError as error:
        raise ConfigError(str(error), hint=error.hint) from None


def _run_checks(session: Session, tell: Progress) -> tuple[list[CheckResult], str | None]:
    """Results of all checks, and what ended them early, if anything did."""
    results: list[CheckResult] = []
    fault: str | None = None
    try:
        session.endpoint.detect()
        session.checkpoint()
    except ToolkitError as error:
        fault = _in_words(error, session)
    for check in CHECKS:
        if fault is not None:
            results.append(_unchecked(check, session, fault))
            continue
        tell({"event": "check", "name": check.name})
        result, fault = _run_check(check, session)
        results.append(result)
        told = {"event": "result", "name": result.name, "status": result.status, "detail": result.detail}
        tell(told | ({"counts": False} if result.uncounted(session.settings.mode) else {}))
    return results, fault


def _run_check(check: Check, session: Session) -> tuple[CheckResult, str | None]:
    start = time.monotonic()
    fault: str | None = None
    try:
        result = check.run(session)
    except (EndpointError, TimeUpError) as error:
        if isinstance(error, TimeUpError) or error.gone:
            fault = _in_words(error, session)
            result = _unchecked(check, session, fault)
        else:
            result = CheckResult(check.name, "failed", check.category, detail=str(error))
    return replace(result, seconds=round(time.monotonic() - start, 3)), fault


def _unchecked(check: Check, session: Session, fault: str) -> CheckResult:
    """The result of a check that a fault prevents; a server that stops answering fails `many_requests`."""
    stopped = check.name == "many_requests" and session.answered > 0 and session.endpoint.remaining > 0
    return CheckResult(check.name, "failed" if stopped else "not_checked", check.category, detail=fault)


def _in_words(error: ToolkitError, session: Session) -> str:
    if isinstance(error, TimeUpError):
        return f"the time limit of {session.settings.time_limit:g} s was reached before every check was made"
    after = f" after {session.answered} answered requests" if session.answered else ""
    return f"{error}{after}"
