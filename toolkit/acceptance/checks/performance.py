"""Acceptance length and tokens/s against the profile's thresholds and the base release's report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.acceptance.checks.counters import other_traffic
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session


@dataclass(frozen=True, slots=True)
class _Base:
    """What the base release's report says of one figure, or why it cannot be used."""

    value: float | None = None
    reason: str = ""


def acceptance_length(session: Session) -> CheckResult:
    """Tokens per verify step over 16 prompts at once, bonus token included."""
    result = partial(CheckResult, "acceptance_length", category="performance")
    if session.algorithm == "NONE":
        return result("not_checked", detail="the server decodes without speculation")
    estimate = session.batch.acceptance_length
    if estimate is None:
        return result("not_checked", detail="the server tells neither verify steps nor counters of them")
    figures: dict[str, Any] = {"acceptance_length": round(estimate.value, 4)}
    if estimate.standard_error is not None:
        figures["standard_error"] = round(estimate.standard_error, 4)
    if session.batch.steps is None and (traffic := other_traffic(session)) is not None:
        return result(
            "not_judged", measured=figures, detail=f"read from counters, with other traffic: {traffic}"
        )
    base = _base(session, "acceptance_length", ("acceptance_length", "tree", "value"))
    settings = session.settings
    bounds = _bounds(settings.min_acceptance_length, base, settings.tolerance)
    return _judge(result, estimate.value, bounds, base, figures)


def tokens_per_second(session: Session) -> CheckResult:
    """Generated tokens a second over all requests of the load, from the first sent to the last answered."""
    result = partial(CheckResult, "tokens_per_second", category="performance")
    run = session.loaded
    if not run.tokens:
        return result("not_checked", detail="the server does not tell how many tokens it generated")
    speed = run.tokens / run.seconds
    figures = {"tokens_per_second": round(speed, 1), "requests": len(run.asks)}
    traffic = other_traffic(session)
    if traffic is not None:
        return result("not_judged", measured=figures, detail=f"other traffic: {traffic}")
    base = _base(session, "tokens_per_second", ("tokens_per_second",))
    settings = session.settings
    tolerance = settings.tolerance if settings.speed_tolerance is None else settings.speed_tolerance
    return _judge(result, speed, _bounds(settings.min_tokens_per_second, base, tolerance), base, figures)


def _bounds(minimum: float | None, base: _Base, tolerance: float) -> list[tuple[float, str]]:
    """What a figure must reach, and how to say so."""
    bounds = [] if minimum is None else [(minimum, f"at least {minimum:g}")]
    if base.value is not None:
        floor = (1 - tolerance) * base.value
        bounds.append((floor, f"at least {floor:.4g} ({tolerance:.0%} under the base's {base.value:.4g})"))
    return bounds


def _judge(
    result: partial[CheckResult],
    value: float,
    bounds: list[tuple[float, str]],
    base: _Base,
    figures: dict[str, Any],
) -> CheckResult:
    if base.value is not None:
        figures["base"] = round(base.value, 4)
    expected = " and ".join(text for _, text in bounds) or "no threshold set"
    missed = [text for bound, text in bounds if value < bound]
    if missed:
        return result("failed", measured=figures, expected=expected, detail=f"{value:.4g} is not {missed[0]}")
    return result("passed", measured=figures, expected=expected, detail=base.reason)


def _base(session: Session, check: str, keys: tuple[str, ...]) -> _Base:
    """One figure of the first base report that has it; why the base itself lacks it, where none has."""
    found = [_figure(session, path, check, keys) for path in session.settings.base_reports]
    return next((base for base in found if base.value is not None), found[0] if found else _Base())


def _figure(session: Session, path: str, check: str, keys: tuple[str, ...]) -> _Base:
    """One figure of a report, if it was judged there on the same prompts at the same concurrency."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        load = report["load"]
        same = (
            report["prompts"]["sha256"] == session.prompts_hash
            and load["concurrency"] == session.settings.concurrency
            and load["tokens"] == session.settings.load_tokens
            and load["compared_tokens"] == session.settings.max_new_tokens
        )
        unjudged = any(it["name"] == check and it["status"] == "not_judged" for it in report["checks"])
        value: Any = report
        for key in keys:
            value = value[key] if value is not None else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return _Base(reason=f"the base report {path} cannot be read: not compared with it")
    if not same:
        return _Base(reason="the base report has other prompts, lengths or concurrency: not compared with it")
    if unjudged:
        return _Base(reason="the base's figure was not judged, beside other traffic: not compared with it")
    if not isinstance(value, int | float):
        return _Base(reason="the base report lacks this figure: not compared with it")
    return _Base(value=float(value))
