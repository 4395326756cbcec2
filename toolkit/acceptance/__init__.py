"""Acceptance: checks against a served endpoint, over HTTP only, and their report."""

from toolkit.acceptance.report import Report, load_report, report_from_json
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.run import run_acceptance
from toolkit.acceptance.settings import Settings, load_settings, settings_for

__all__ = [
    "CheckResult",
    "Report",
    "Settings",
    "load_report",
    "load_settings",
    "report_from_json",
    "run_acceptance",
    "settings_for",
]
