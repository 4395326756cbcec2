"""The doctor before a deploy: a failure stops it before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from toolkit.doctor.report import Report
from toolkit.errors import ToolkitError

# What fails only until the deploy's own provisioning has set it right: owner and mode of the cache.
MENDED = {"provision": ("cache",)}


def mended_by(actions: Iterable[str]) -> tuple[str, ...]:
    """Names of the checks whose failures a plan with these steps mends by itself."""
    return tuple(name for action in actions for name in MENDED.get(action, ()))


def preflight(report: Report, step: Callable[[str, str], None], host: str = "") -> None:
    """Go on with a deploy only where the doctor found nothing that would fail.

    Args:
        report: what was found, before the deploy.
        step: told of it.
        host: the host's name, "" for this machine.

    Raises:
        ToolkitError: a check fails; says all that do.
    """
    step("doctor", summary_of(report))
    if (why := refusal(report, host)) is not None:
        raise why


def summary_of(report: Report) -> str:
    """In one line, with the warnings and what was ignored."""
    passed = len(report.of("pass"))
    parts = [f"{passed} checks passed"]
    if warnings := report.of("warn"):
        parts.append("warnings: " + "; ".join(map(str, warnings)))
    if passed_over := [item for item in report.of("fail") if item.check in report.ignored]:
        parts.append("ignored: " + "; ".join(map(str, passed_over)))
    return "; ".join(parts)


def refusal(report: Report, host: str = "") -> ToolkitError | None:
    """Why a host with these findings is not touched; None where nothing that counts fails.

    Args:
        report: what was found.
        host: its name, "" for this machine.
    """
    if not report.failures:
        return None
    front = f"{host}: " if host else ""
    lines = [f"{front}{line}" for line in report.lines()]
    names = dict.fromkeys(item.check for item in report.failures)
    past = " ".join(f"--ignore-check {name}" for name in names)
    return ToolkitError(
        "\n".join([f"{front}nothing was touched, since the doctor found what would fail:", *lines]),
        hint=f"mend it, or deploy all the same with {past}",
    )
