"""`/metrics` agrees with what was sent, and whether anyone else was sending."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Checkpoint, Session

_EXPECTED = "the server's counters move by what was sent"
_IDLE = 0.3


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much a counter moved, and what was sent, between two checkpoints."""

    sent: float
    counted: float


def other_traffic(session: Session) -> str | None:
    """Signs that others use the server too, in words; None without a sign.

    Signs: requests run while none of ours does; more run than we sent at once; counters move while we
    send nothing; in some stretches, but not in all, more requests are counted than we sent. (In all of
    them, by the same factor, would be a server that counts twice.)
    """
    points = session.checkpoints
    if any(point.busy > 0 for point in points):
        return "requests ran while none of ours did"
    if session.highest_load is not None and session.highest_load > session.settings.concurrency:
        return f"{session.highest_load:g} requests ran while {session.settings.concurrency} were ours"
    stretches = _stretches(points, "requests") or _stretches(points, "completion_tokens")
    if any(stretch.counted > 0 for stretch in stretches if stretch.sent == 0):
        return "counters moved while nothing of ours ran"
    factors = {round(stretch.counted / stretch.sent, 6) for stretch in stretches if stretch.sent > 0}
    if len(factors) > 1 and max(factors) > 1:
        return "more requests were counted than we sent"
    return None


def metrics_agree(session: Session) -> CheckResult:
    """Every counter that the server has moved by exactly the sum of what the answers tell."""
    result = partial(CheckResult, "metrics", expected=_EXPECTED)
    session.checkpoint()
    if not session.checkpoints:
        return result("not_checked", detail="the server has no /metrics with counters that are known")
    time.sleep(_IDLE)
    session.checkpoint()
    totals = {name: _total(session.checkpoints, name) for name in session.checkpoints[-1].counted}
    figures = {
        name: {"sent": total.sent, "counted": total.counted}
        for name, total in totals.items()
        if total is not None
    }
    wrong = {name for name, pair in figures.items() if pair["sent"] != pair["counted"]}
    if not wrong:
        return result("passed", measured=figures)
    lacking = [name for name in sorted(wrong) if figures[name]["counted"] < figures[name]["sent"]]
    if lacking:
        return result("failed", measured=figures, detail=f"counted less than sent: {', '.join(lacking)}")
    traffic = other_traffic(session)
    requests_agree = "requests" in figures and "requests" not in wrong
    if traffic is not None and not requests_agree:
        return result("not_judged", measured=figures, detail=f"other traffic: {traffic}")
    names = ", ".join(sorted(wrong))
    return result(
        "failed", measured=figures, detail=f"counted more than once, or what was never sent: {names}"
    )


def _total(points: list[Checkpoint], name: str) -> Excess | None:
    """Sums over all stretches in which every answer told the figure; None if there is none."""
    told = _stretches(points, name)
    if not any(stretch.sent for stretch in told):
        return None
    return Excess(sum(s.sent for s in told), sum(s.counted for s in told))


def _stretches(points: list[Checkpoint], name: str) -> list[Excess]:
    """Between each checkpoint and the next: what was sent and counted, where every answer told the figure."""
    return [
        Excess(b.sent[name] - a.sent[name], b.counted[name] - a.counted.get(name, 0.0))
        for a, b in pairwise(points)
        if name in b.counted and name in b.sent and name not in b.untold
    ]
