"""How a release is judged: its acceptance program, and its further launches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.acceptance.settings import settings_for
from toolkit.layout import Layout
from toolkit.profile.schema import Profile
from toolkit.release.request import Acceptance, Comparison, Launch
from toolkit.release.store import ACCEPTANCE_FILE, Release
from toolkit.service.command import release_unit
from toolkit.service.unit import Unit

# What starting Python and writing the report may take beyond the acceptance's own limit, in seconds.
_MARGIN = 30.0


@dataclass(frozen=True, slots=True)
class Judging:
    """How a change is judged.

    Attributes:
        new_baseline: do not compare with the base release's report; the thresholds of the profile still hold.
        experiment_seconds: gate on correctness only and return to the base after this time.
    """

    new_baseline: bool = False
    experiment_seconds: float | None = None


def acceptance_of(profile: Profile, unit: Unit, bases: Sequence[Release], judging: Judging) -> Acceptance:
    """The program that judges a release of `profile` against the first of `bases` that has each figure.

    A base whose report hands have changed has none.
    """
    sound = [base for base in bases if base.acceptance and base.report_damage() is None]
    reports = [] if judging.new_baseline else [base.path / ACCEPTANCE_FILE for base in sound]
    settings = settings_for(
        profile,
        unit.url,
        base_reports=reports,
        mode="acceptance" if judging.experiment_seconds is None else "experiment",
        keys_from_environment=True,
    )
    return Acceptance(
        command=(sys.executable, "-m", "toolkit.acceptance.run"),
        settings=settings.model_dump(mode="json"),
        time_limit=profile.acceptance.time_limit + _MARGIN,
    )


def comparison_of(
    profile: Profile, folder: Path, manifest: Mapping[str, Any], layout: Layout
) -> Comparison | None:
    """The release as linear DFLASH and as the chain, for level `full`; None unless it decodes with DDTREE."""
    tree = profile.speculative
    if tree.algorithm != "DDTREE":
        return None
    changes: dict[str, dict[str, Any]] = {
        "dflash": {"algorithm": "DFLASH"},
        "chain": {"budget": tree.block_size - 1, "topk_cap": 1, "expansion": "chain"},
    }
    program = (sys.executable, "-m", "toolkit.acceptance.launch")
    limit = profile.acceptance.time_limit + _MARGIN
    launches = []
    for name, change in changes.items():
        variant = profile.model_copy(update={"speculative": tree.model_copy(update=change)})
        unit = release_unit(variant, manifest, folder, layout)
        settings = settings_for(variant, unit.url, keys_from_environment=True).model_dump(mode="json")
        launches.append(Launch(name, unit.to_json(), Acceptance((*program, "measure"), settings, limit)))
    return Comparison(tuple(launches), Acceptance((*program, "compare"), {}, limit))
