"""A change for good that keeps an experiment which was found worse already."""

import json
import subprocess
import sys

import pytest

from tests.deploy.conftest import Site, on_trial
from toolkit.cli.fleet.changing import _confirm_changes
from toolkit.cli.fleet.where import Manner
from toolkit.deploy.judging import Judging
from toolkit.deploy.swap import foreseen, swap_changes
from toolkit.errors import ConfigError
from toolkit.fleet.results import HostResult
from toolkit.profile.loading import load_profile
from toolkit.release.host import ServiceHost
from toolkit.release.locate import layout_of
from toolkit.release.losing import Loss
from toolkit.release.store import Release

RATE = "host.download_rate"
LENGTH = {"name": "acceptance_length", "status": "failed", "category": "performance", "detail": "2.1 is not"}
SPEED = {"name": "tokens_per_second", "status": "failed", "category": "performance", "detail": "9 is not"}


def judged(release: Release, *checks: dict[str, str], name: str = "acceptance.json") -> None:
    """Let an experiment's report have these checks."""
    (release.path / name).write_text(json.dumps({"mode": "experiment", "checks": checks}))


def test_a_swap_that_keeps_what_lost_already_is_asked_about_before_it_begins(staged: Site) -> None:
    base, tried = on_trial(staged)
    judged(tried, LENGTH)
    shown = staged.run("swap", "--set", "service.stop_timeout=9s")
    assert shown.returncode == 2
    note = (
        "  note: what is tried failed already, which did not count in an experiment, but does in this, held "
        f"against {base.id}: acceptance_length: 2.1 is not\n"
    )
    assert shown.stderr.endswith(
        f"{note}error: local: the swap would be undone: what it keeps was judged as worse already\n"
        "  next: add --new-baseline to keep it all the same, or --yes to have it judged again; ddtoolkit "
        "rollback local ends the experiment\n"
    ), shown.stderr
    assert staged.json("history") == []
    preview = {"service": "local", "sets": ["speculative.budget=20"]}
    found = subprocess.run(
        [sys.executable, "-P", "-m", "toolkit.hostside"],
        env=staged.environment, input=json.dumps({"op": "swap_preview", "args": preview}) + "\n",
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert '"loses": true' in found


def test_a_deploy_that_keeps_it_is_asked_about_too(staged: Site) -> None:
    base, tried = on_trial(staged)
    judged(tried, LENGTH)
    keeps = ("--set", "speculative.budget=20")
    shown = staged.run("deploy", "profile", str(staged.profile), *keeps)
    assert shown.returncode == 2
    note = f"against {base.id}: acceptance_length: 2.1 is not\n"
    assert note in shown.stderr
    assert "error: this machine: the deploy would be undone: what it keeps was judged" in shown.stderr
    plan = staged.json("plan", str(staged.profile), *keeps)
    assert plan["loses"]
    # One that ends the experiment is not, nor one on whose figures it says nothing certain.
    for other in ((), ("--set", "speculative.budget=21"), (*keeps, "--set", "speculative.topk_cap=4")):
        assert not staged.json("plan", str(staged.profile), *other)["loses"], other
    assert staged.json("history") == []


def test_only_what_could_not_come_out_otherwise_is_asked_about(staged: Site) -> None:
    base, tried = on_trial(staged)
    host = ServiceHost(layout_of(load_profile(str(staged.profile)).profile), "local")

    def loss(*sets: str, judging: Judging = Judging()) -> Loss | None:  # noqa: B008
        return foreseen(host, tried, swap_changes(host, tried, sets, judging)[1], judging)

    keeps, other = "speculative.budget=20", "service.stop_timeout=9s"
    assert loss(other) is None  # nothing is known of it
    judged(tried, LENGTH, SPEED)
    for sets in ((keeps,), (other,), (keeps, other)):
        found = loss(*sets)
        assert found is not None
        assert (found.certain, found.base) == (True, base.id)
        assert found.failed == ("acceptance_length: 2.1 is not", "tokens_per_second: 9 is not")
    # What may make up for it is told, and tried.
    for more in ("speculative.topk_cap=3", "acceptance.tolerance=0.9", "service.max_running_requests=8"):
        found = loss(keeps, more)
        assert found is not None
        assert not found.certain, more
    # Another value is another matter; so is what is judged by other measures, or not by this at all.
    assert loss("speculative.budget=19") is None
    assert loss(other, judging=Judging(new_baseline=True)) is None
    assert loss(other, judging=Judging(experiment_seconds=60)) is None
    assert loss(f"{RATE}=9MB") is None
    # A speed may come out otherwise, and the newest judgement counts.
    judged(tried, SPEED, name="acceptance.latest.json")
    found = loss(other)
    assert found is not None
    assert (found.certain, found.failed) == (False, ("tokens_per_second: 9 is not",))
    judged(tried, name="acceptance.latest.json")
    assert loss(other) is None


def test_hosts_on_which_that_is_known_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {"changes": ["a: 1 -> 2"], "restarts": True, "notices": ["why"]}
    previews = [HostResult("ct200", {**shown, "loses": True}), HostResult("ct201", {**shown, "loses": False})]
    _confirm_changes("swap", "small", previews, Manner(yes=True, verbose=False, as_json=False, lock_wait=0.0))
    with pytest.raises(ConfigError, match=r"^ct200: the swap would be undone: ") as caught:
        _confirm_changes(
            "swap", "small", previews, Manner(yes=False, verbose=False, as_json=False, lock_wait=0)
        )
    assert caught.value.hint is not None
    assert "ddtoolkit rollback small ends the experiment" in caught.value.hint
    assert "ct200: note: why" in capsys.readouterr().err
