"""Looking at the machine that this runs on and judging it; the standard library alone is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.doctor.collect import collect
from toolkit.doctor.facts import Facts
from toolkit.doctor.report import Report, judge
from toolkit.doctor.wanted import Wanted


def examine(examination: Mapping[str, Any]) -> Report:
    """What is wrong with this machine for a profile.

    Args:
        examination: as `toolkit.doctor.request.examination` makes it: `request` (what to ask), `wanted` (what
            the profile wants), `ignored` (names of checks) and `load` (what to measure, or None).
    """
    wanted = Wanted.from_json(examination["wanted"])
    facts = collect(examination["request"])
    if examination.get("load") is not None:
        from toolkit.doctor.load.measure import load_on

        facts["load"] = load_on(examination["load"], Facts(facts), wanted)
    return judge(facts, wanted, ignored=examination["ignored"])
