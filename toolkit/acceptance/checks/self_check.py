"""The engine's own report on itself, where it has one."""

from __future__ import annotations

from typing import Any

from toolkit.acceptance.exchange import EndpointError
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session

_EXPECTED = "every item of /ddtree/self_check holds"


def self_check(session: Session) -> CheckResult:
    """Every item of the engine's self-check holds."""
    if not session.endpoint.native or session.algorithm == "NONE":
        return CheckResult(
            "self_check", "not_checked", expected=_EXPECTED, detail="the server has no self-check"
        )
    try:
        report = session.endpoint.self_check()
    except EndpointError as error:
        if not error.refused:
            raise
        return CheckResult("self_check", "not_checked", expected=_EXPECTED, detail=str(error))
    if report is None:
        return CheckResult(
            "self_check", "not_checked", expected=_EXPECTED, detail="the server has no self-check"
        )
    items = _items(report)
    if not items:
        detail = f"/ddtree/self_check answered no list of checks: {str(report)[:200]}"
        return CheckResult("self_check", "failed", expected=_EXPECTED, detail=detail)
    bad = [item for item in items if not item.get("ok")]
    return CheckResult(
        "self_check",
        "failed" if bad else "passed",
        measured={"items": len(items), "failed": [str(item.get("name")) for item in bad]},
        expected=_EXPECTED,
        detail="; ".join(f"{item.get('name')}: {item.get('detail', '')}" for item in bad[:3]),
    )


def _items(report: Any) -> list[dict[str, Any]]:
    found = report.get("checks") if isinstance(report, dict) else report
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
