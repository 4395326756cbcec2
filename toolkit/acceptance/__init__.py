"""Acceptance: checks against a served endpoint, over HTTP only, and their report."""

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
