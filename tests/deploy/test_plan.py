"""From desired and observed state to steps with reasons."""

from pathlib import Path
from typing import Any

import pytest

from toolkit.acceptance.settings import settings_for
from toolkit.build.environment import Environment
from toolkit.layout import Layout
from toolkit.plan.finding import Drift, Mend
from toolkit.plan.steps import CurrentRelease, Desired, Observed, Plan, make_plan
from toolkit.profile.loading import differences, load_profile
from toolkit.profile.recorded import RECORDED, restarts
from toolkit.service.command import unit_for

ENVIRONMENT = Environment(Path("/usr/bin/python3"), {"torch": "2.13.0"}, "aa")
PROFILE: dict[str, Any] = {"name": "x", "speculative": {"budget": 16}, "acceptance": {"level": "quick"}}


def manifest(**changes: Any) -> dict[str, Any]:
    built = {"python": str(ENVIRONMENT.python), "digest": ENVIRONMENT.digest}
    built |= {"versions": ENVIRONMENT.versions, "source": ENVIRONMENT.source}
    return {"environment": built | changes, "checkpoints": {}}


def plan(observed: Observed, *, checkpoints: dict[str, Any] | None = None) -> Plan:
    return make_plan("x", Desired(PROFILE, ENVIRONMENT, checkpoints or {}), observed)


def actions(made: Plan) -> list[str]:
    return [step.action for step in made.steps]


def current(
    profile: dict[str, Any] = PROFILE, swapped: tuple[str, ...] = (), **changes: Any
) -> CurrentRelease:
    return CurrentRelease("r1", profile, manifest(**changes), swapped)


def test_what_is_deployed_and_runs_needs_nothing() -> None:
    made = plan(Observed(release=current(), state="running"))
    assert made.empty
    assert made.downtime == 0


def test_a_secret_with_a_new_value_needs_a_release() -> None:
    desired = Desired(PROFILE, ENVIRONMENT, {}, ["service.api_key"])
    made = make_plan("x", desired, Observed(release=current(), state="running"))
    assert actions(made) == ["release", "restart", "acceptance"]
    assert made.steps[0].reasons == ("service.api_key has a new value",)


def test_what_runs_as_an_experiment_is_not_deployed() -> None:
    """Else it would be said to be there, and be gone when its time is over."""
    made = plan(Observed(release=current(), state="running", trial="r0"))
    assert actions(made) == ["release", "restart", "acceptance"]
    assert made.steps[0].reasons == ("what runs is an experiment, which would give way to r0",)
    rate = current({**PROFILE, "host": {"download_rate": "9MB"}})
    assert actions(plan(Observed(release=rate, state="running", trial="r0")))[0] == "release"


def test_a_first_deploy_does_everything_in_order() -> None:
    made = plan(Observed(missing=["folder /x is missing"]))
    assert actions(made) == ["provision", "build", "release", "start", "acceptance"]
    assert made.steps[0].reasons == ("folder /x is missing",)
    assert made.steps[3].reasons == ("first release, nothing serves yet",)


def test_a_stopped_service_is_only_started() -> None:
    assert actions(plan(Observed(release=current(), state="stopped"))) == ["start"]


def test_a_changed_key_is_one_restart_with_its_diff_and_downtime() -> None:
    old = PROFILE | {"speculative": {"budget": 7}}
    made = plan(Observed(release=current(old, ("speculative.budget",)), state="running", load_seconds=4.5))
    assert actions(made) == ["release", "restart", "acceptance"]
    assert made.steps[0].reasons == ("speculative.budget: 7 -> 16",)
    assert [change.key for change in made.undone_swaps] == ["speculative.budget"]
    assert made.downtime == 4.5


def test_a_key_that_the_server_does_not_depend_on_is_put_on_record() -> None:
    old = PROFILE | {"host": {"download_rate": None, "wheelhouse": "/srv/old"}}
    new = PROFILE | {"host": {"download_rate": 9, "wheelhouse": "/srv/new"}}
    desired = Desired(new, ENVIRONMENT, {})
    made = make_plan("x", desired, Observed(release=current(old), state="running", load_seconds=4.5))
    assert (actions(made), made.downtime) == (["record"], 0.0)
    assert made.steps[0].reasons == (
        "host.download_rate: unset -> 9",
        "host.wheelhouse: /srv/old -> /srv/new",
    )
    assert actions(make_plan("x", desired, Observed(release=current(old), state="stopped"))) == [
        "record",
        "start",
    ]
    # Beside a key that takes a restart it comes with the new release.
    wider = desired.profile | {"speculative": {"budget": 32}}
    made = make_plan("x", Desired(wider, ENVIRONMENT, {}), Observed(release=current(old), state="running"))
    assert actions(made) == ["release", "restart", "acceptance"]
    assert len(made.steps[0].reasons) == 3


OTHER = {
    "description": "another",
    "hardware.driver": "{branch: 590}",
    "hardware.min_driver": "580.95.05",
    "host.download_files": "7",
    "host.download_rate": "9MB",
    "host.journal_max_size": "1GiB",
    "host.min_free_disk": "7GiB",
    "host.model_hub": "https://hub.example",
    "host.os": "debian-12",
    "host.packages": "[jq]",
    "host.time_sync": "false",
    "host.wheelhouse": "/srv/wheels",
    "service.keep_releases": "9",
}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("systemd-cpu", key) for key in RECORDED if not key.startswith("hardware.")),  # a CPU has no driver
        *(("rtx-pro-6000-pcie-8x", key) for key in RECORDED),
    ],
)
def test_the_server_and_its_judgement_do_not_depend_on_what_is_only_recorded(name: str, key: str) -> None:
    before = load_profile(name).profile
    after = load_profile(name, sets=[f"{key}={OTHER[key]}"]).profile
    changes = differences(before, after)
    assert changes
    assert not restarts(changes)
    layout = Layout()
    folder = layout.service(name).releases / "20260101T000000Z-00000000"
    units = [
        unit_for(profile, release_dir=folder, layout=layout, python=Path("/usr/bin/python3"))
        for profile in (before, after)
    ]
    assert units[0].to_json() == units[1].to_json()
    judged = [settings_for(profile, units[0].url) for profile in (before, after)]
    assert judged[0] == judged[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": {"torch": "2.11.0"}}, "torch 2.11.0 -> 2.13.0"),
        ({"source": "bb"}, "the toolkit's own code changed"),
        ({"python": "/opt/python3"}, "another interpreter: /usr/bin/python3"),
    ],
)
def test_a_changed_environment_is_built_and_its_reason_told(changes: dict[str, Any], reason: str) -> None:
    made = plan(Observed(release=current(**changes), state="running"))
    assert actions(made) == ["build", "release", "restart", "acceptance"]
    assert made.steps[0].reasons == (reason,)


def test_a_changed_checkpoint_is_seen() -> None:
    made = plan(Observed(release=current(), state="running"), checkpoints={"target": {"a": [1, 2, 3]}})
    assert made.steps[0].reasons == ("the target checkpoint changed",)


def test_a_damaged_release_is_replaced_and_its_damage_told() -> None:
    made = plan(Observed(release=None, state="running", damage="the current release is damaged: x"))
    assert actions(made) == ["build", "release", "restart", "acceptance"]
    assert made.steps[1].reasons == ("the current release is damaged: x",)


def test_a_missing_environment_is_built_again() -> None:
    made = plan(Observed(release=current(), state="running", damage="its environment /e is missing"))
    assert made.steps[0].reasons == ("its environment /e is missing",)
    assert made.has("restart")


def drift(mend: Mend) -> Drift:
    return Drift("unit", "x.service", "is odd", "mend it", "even", "odd", mend)


@pytest.mark.parametrize(
    ("mend", "steps"),
    [
        ("repair", ["repair"]),
        ("restart", ["restart"]),
        ("release", ["release", "restart", "acceptance"]),
        ("build", ["build", "release", "restart", "acceptance"]),
        ("planned", []),
        ("hand", []),
    ],
)
def test_a_drift_is_ended_by_the_least_that_does_it(mend: Mend, steps: list[str]) -> None:
    made = plan(Observed(release=current(), state="running", drifts=[drift(mend)], load_seconds=4.5))
    assert actions(made) == steps
    assert made.downtime == (4.5 if "restart" in steps else 0)
    if steps:
        assert made.steps[0].reasons == ("x.service: is odd",)
    assert made.by_hand == (("x.service: is odd; next: mend it",) if mend == "hand" else ())


def test_a_new_release_restarts_once_for_all_drifts() -> None:
    drifts = [drift("restart"), drift("release"), drift("repair")]
    made = plan(Observed(release=current(), state="running", drifts=drifts))
    assert actions(made) == ["repair", "release", "restart", "acceptance"]


def test_a_stopped_service_that_drifted_is_started_and_not_restarted() -> None:
    made = plan(Observed(release=current(), state="stopped", drifts=[drift("restart")]))
    assert actions(made) == ["start"]
