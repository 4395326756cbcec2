"""The doctor before a deploy: a failure stops it before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from toolkit.doctor.ask import facts_here
from toolkit.doctor.report import Report, judge
from toolkit.doctor.request import request_for
from toolkit.errors import ToolkitError
from toolkit.profile.schema import Profile

# What fails only until the deploy's own provisioning has set it right: owner and mode of the cache.
MENDED = {"provision": ("cache",)}


def mended_by(actions: Iterable[str]) -> tuple[str, ...]:
    """Names of the checks whose failures a plan with these steps mends by itself."""
    return tuple(name for action in actions for name in MENDED.get(action, ()))


def preflight_here(
    profile: Profile,
    step: Callable[[str, str], None],
    *,
    actions: Iterable[str] = (),
    ignored: Sequence[str] = (),
) -> None:
    """Look at this machine before a deploy.

    Args:
        profile: the profile.
        step: told what was found.
        actions: the steps of the plan.
        ignored: names of checks whose failures do not count.

    Raises:
        ToolkitError: a check fails; says all that do.
    """
    passed_over = (*ignored, *mended_by(actions))
    report = judge(facts_here(request_for(profile, weights=False)), profile, ignored=passed_over)
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
