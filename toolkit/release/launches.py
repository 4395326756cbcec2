"""Further launches of a release, to be measured and held against it: acceptance level `full`.

Each stops what serves, starts the same release with another command, and measures it. Nothing of this is
recorded as a release; the transaction keeps its lock and makes one entry in the history.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files import json_bytes, write_new
from toolkit.release.judge import Verdict, judge
from toolkit.release.request import Acceptance, Comparison
from toolkit.release.steps import Steps
from toolkit.release.store import Release
from toolkit.service.unit import UNIT_FILE, Unit, write_unit

_FOLDER = "launches"
_SETTINGS = "settings.json"
_RESULT = "measurement.json"


def write_launches(folder: Path, comparison: Comparison) -> None:
    """Write what the launches need below the transaction's folder.

    Raises:
        OSError: the disk is full.
    """
    (folder / _FOLDER).mkdir(mode=0o700)
    for launch in comparison.launches:
        place = folder / _FOLDER / launch.name
        place.mkdir(mode=0o700)
        write_new(place / UNIT_FILE, write_unit(Unit.from_json(launch.unit)))
        write_new(place / _SETTINGS, json_bytes(launch.measure.settings))
    write_new(folder / _FOLDER / _SETTINGS, json_bytes(comparison.judge.settings))


def compare_launches(
    comparison: Comparison,
    release: Release,
    *,
    folder: Path,
    report: Path,
    steps: Steps,
    relaunch: Callable[[str, Path, Unit], None],
) -> None:
    """Measure every launch, start the release again, and judge.

    Args:
        comparison: what to launch.
        release: the release whose report it is held against; it serves before and after.
        folder: the transaction's folder.
        report: the release's report; replaced by the one with the further results.
        steps: the journal.
        relaunch: stops what serves, starts the unit in a folder, and waits for a real token; given a name
            for the steps, the folder and its unit.

    Raises:
        StepFailedError: a launch did not serve, could not be measured, or the judgement refuses the release.
    """
    measured: list[str] = []
    for launch in comparison.launches:
        place = folder / _FOLDER / launch.name
        unit = Unit.from_json(launch.unit)
        relaunch(launch.name, place, unit)
        with steps.step(f"measure_{launch.name}", f"measuring it as {launch.name}"):
            program = _with(launch.measure, "--report", str(report))
            _require(_run(program, unit, place / _SETTINGS, place / _RESULT, steps, launch.name))
        measured += ["--launch", f"{launch.name}={place / _RESULT}"]
    relaunch("release", release.path, release.unit)
    with steps.step("compare", "holding the launches against the release"):
        program = _with(comparison.judge, "--report", str(report), *measured)
        out = folder / _FOLDER / "report.json"
        verdict = _run(program, release.unit, folder / _FOLDER / _SETTINGS, out, steps, "compare")
        if verdict.report is not None:
            out.replace(report)
        _require(verdict)


def _run(program: Acceptance, unit: Unit, settings: Path, out: Path, steps: Steps, name: str) -> Verdict:
    return judge(
        program, unit, settings=settings, out=out, on_progress=lambda value: steps.progress(name, value)
    )


def _require(verdict: Verdict) -> None:
    if not verdict.accepted:
        raise ToolkitError(verdict.message)


def _with(program: Acceptance, *arguments: str) -> Acceptance:
    return Acceptance((*program.command, *arguments), program.settings, program.time_limit)
