"""The report that a release was accepted with, and later changes are held against, edited by hand."""

import json

import pytest

from tests.deploy.conftest import Site, on_trial
from toolkit.acceptance.report import Report
from toolkit.deploy.bases import bases_of
from toolkit.deploy.judging import Judging, acceptance_of
from toolkit.deploy.swap import swap_changes
from toolkit.errors import ToolkitError
from toolkit.profile.loading import load_profile, profile_from_data
from toolkit.release.host import ServiceHost
from toolkit.release.locate import layout_of
from toolkit.release.store import Release

BUDGET = ["speculative.budget=7"]


def accepted(site: Site) -> tuple[ServiceHost, Release]:
    """The service, and its release, with a report as an acceptance writes it."""
    host = ServiceHost(layout_of(load_profile(str(site.profile)).profile), "local")
    current = host.store.current()
    assert current is not None
    lengths = {"tree": {"value": 3.36, "standard_error": 0.21, "histogram": [1, 2]}}
    report = Report(
        "accepted",
        (),
        False,
        False,
        "acceptance",
        "quick",
        "2026-11-30T04:12:00+00:00",
        9.5,
        {},
        (),
        lengths,
        867.4,
    )
    (current.path / "acceptance.json").write_text(json.dumps(report.to_json(), indent=2))
    return host, current


def edit(release: Release) -> None:
    """Lower the bar by hand."""
    path = release.path / "acceptance.json"
    path.write_text(path.read_text().replace("3.36", "2.36"))


def damage(release: Release) -> None:
    path = release.path / "acceptance.json"
    path.write_text(path.read_text()[:100])


def empty(release: Release) -> None:
    (release.path / "acceptance.json").write_text("{}")


def remove(release: Release) -> None:
    (release.path / "acceptance.json").unlink()


def test_one_that_nobody_touched_is_sound(staged: Site) -> None:
    host, current = accepted(staged)
    assert current.report_damage() is None
    assert swap_changes(host, current, BUDGET, Judging())[1]
    assert not [item for item in staged.json("drift") if "acceptance.json" in item["subject"]]
    # Of a version that wrote no digest.
    (current.path / "acceptance.json").write_text(json.dumps({"verdict": "accepted"}))
    assert current.report_damage() is None


@pytest.mark.parametrize(
    ("touch", "words"),
    [
        (edit, "is not the report that its acceptance wrote"),
        (damage, "is damaged"),
        (empty, "is damaged"),
        (remove, "is missing"),
    ],
)
def test_a_swap_is_not_held_against_what_hands_have_written(staged: Site, touch, words) -> None:
    host, current = accepted(staged)
    touch(current)
    path = current.path / "acceptance.json"
    shown = staged.run("swap", "--set", *BUDGET, "--yes")
    assert shown.returncode == 1
    again = current.given.deploy("local")
    assert shown.stderr == (
        f"error: {path}: {words}\n"
        f"  next: {again} makes a release that is held against those before; the same with --new-baseline is "
        "judged by the profile's thresholds alone\n"
    )
    assert staged.json("history") == []
    for judging in (Judging(new_baseline=True), Judging(experiment_seconds=60.0)):
        assert swap_changes(host, current, BUDGET, judging)[1]
    # What restarts nothing is judged by nothing.
    assert swap_changes(host, current, ["service.keep_releases=9"], Judging())[1]
    if touch is remove:
        return  # which drift tells by words of its own
    (found,) = [item for item in staged.json("drift") if item["subject"] == str(path)]
    assert found["found"] == f"{words}: no change is held against it"
    assert found["fix"] == again
    (status,) = staged.json("status")
    assert [text for text in status["warnings"] if words in text]


def test_a_deploy_makes_a_release_that_is_held_against_those_before(staged: Site) -> None:
    host, current = accepted(staged)
    profile = profile_from_data(current.profile)

    def reports() -> list[str]:
        asked = acceptance_of(profile, current.unit, bases_of(host, current), Judging())
        return list(asked.settings["base_reports"])

    assert reports() == [str(current.path / "acceptance.json")]
    edit(current)
    assert reports() == []
    plan = staged.json("plan", str(staged.profile))
    assert "release" in [step["action"] for step in plan["steps"]]


def test_the_swap_of_an_experiment_s_values_looks_at_its_base(staged: Site) -> None:
    accepted(staged)
    base, tried = on_trial(staged)
    edit(base)
    host = ServiceHost(layout_of(load_profile(str(staged.profile)).profile), "local")
    with pytest.raises(ToolkitError, match=f"{base.id}/acceptance.json: is not the report"):
        swap_changes(host, tried, ["speculative.topk_cap=4"], Judging())
