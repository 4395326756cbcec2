"""The doctor before a deploy: a failure stops it before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolkit.doctor.ask import facts_here
from toolkit.doctor.report import Report, judge
from toolkit.doctor.request import request_for
from toolkit.errors import ToolkitError
from toolkit.profile.schema import Profile


def preflight_here(
    profile: Profile, step: Callable[[str, str], None], *, ignored: Sequence[str] = ()
) -> None:
    """Look at this machine before a deploy.

    Args:
        profile: the profile.
        step: told what was found.
        ignored: names of checks whose failures do not count.

    Raises:
        ToolkitError: a check fails; says all that do.
    """
    report = judge(facts_here(request_for(profile, weights=False)), profile, ignored=ignored)
    step("doctor", summary_of(report))
    require_sound(report)


def summary_of(report: Report) -> str:
    """In one line, with the warnings and what was ignored."""
    passed = len(report.of("pass"))
    parts = [f"{passed} checks passed"]
    if warnings := report.of("warn"):
        parts.append("warnings: " + "; ".join(map(str, warnings)))
    if passed_over := [item for item in report.of("fail") if item.check in report.ignored]:
        parts.append("ignored: " + "; ".join(map(str, passed_over)))
    return "; ".join(parts)


def require_sound(report: Report, host: str = "") -> None:
    """Refuse a host with failures that count.

    Args:
        report: what was found.
        host: its name, "" for this machine.

    Raises:
        ToolkitError: a check fails.
    """
    if not report.failures:
        return
    front = f"{host}: " if host else ""
    lines = [f"{front}{item}" + (f"; fix: {item.fix}" if item.fix else "") for item in report.failures]
    names = dict.fromkeys(item.check for item in report.failures)
    past = " ".join(f"--ignore-check {name}" for name in names)
    raise ToolkitError(
        "\n".join([f"{front}nothing was touched, since the doctor found what would fail:", *lines]),
        hint=f"mend it, or deploy all the same with {past}",
    )
