"""Which releases were refused, and why: a rollback goes to one of those only where that is asked for."""

from __future__ import annotations

from toolkit.release import history
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release

_JUDGED = ("deploy", "swap", "experiment", "rollback")
_UNDONE = {
    "rolled_back": "was rolled back",
    "rollback_failed": "failed",
    "first_failed": "failed",
}


def refusal(host: ServiceHost, release: Release) -> str | None:
    """How and why a release was refused the last time it was judged, in words.

    Returns:
        None where it was accepted once, if only on trial, and where nothing ever judged it.
    """
    entries = [item for item in history.read(host.paths) if item.release == release.id]
    judged = [item for item in entries if item.kind in _JUDGED]
    if release.acceptance is not None or any(item.outcome == "committed" for item in judged):
        return None
    for entry in reversed(judged):
        if entry.outcome in _UNDONE:
            when = f"{entry.when[:19].replace('T', ' ')}Z"
            why = entry.reason or entry.message
            return f"its {entry.kind} by {entry.who} {_UNDONE[entry.outcome]} at {when}: {why}"
    report = release.refused
    if report is None:
        return None
    reasons = report.get("reasons")
    told = "; ".join(map(str, reasons)) if isinstance(reasons, list) else "its report gives no reason"
    return f"its acceptance of {report.get('started', 'an unknown time')} refused it: {told}"
