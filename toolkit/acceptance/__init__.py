"""Acceptance: checks against a served endpoint, over HTTP only, and their report.

What is named here is imported when it is first asked for: an agent on a host that writes an acceptance's
settings need not load an HTTP client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.acceptance.measurement import (
        Measurement,
        compare_reports,
        measure,
        measurement_from_json,
        with_results,
    )
    from toolkit.acceptance.report import Report, load_report, report_from_json
    from toolkit.acceptance.result import CheckResult
    from toolkit.acceptance.runner import run_acceptance
    from toolkit.acceptance.settings import Settings, load_settings, settings_for

_HOMES = {
    "CheckResult": "result",
    "Measurement": "measurement",
    "Report": "report",
    "Settings": "settings",
    "compare_reports": "measurement",
    "load_report": "report",
    "load_settings": "settings",
    "measure": "measurement",
    "measurement_from_json": "measurement",
    "report_from_json": "report",
    "run_acceptance": "runner",
    "settings_for": "settings",
    "with_results": "measurement",
}

__all__ = [
    "CheckResult",
    "Measurement",
    "Report",
    "Settings",
    "compare_reports",
    "load_report",
    "load_settings",
    "measure",
    "measurement_from_json",
    "report_from_json",
    "run_acceptance",
    "settings_for",
    "with_results",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
