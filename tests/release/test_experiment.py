"""An experiment returns to its base by itself, whatever became of the command that began it."""

import json
import os
import signal
import time

import pytest
from changes import change, request
from stub_service import ACCEPTS, REFUSES, StubService, wait_until

from toolkit.release import history
from toolkit.release.controller import begin, follow, hold
from toolkit.release.experiment import read_experiment
from toolkit.release.request import Acceptance
from toolkit.release.view import status


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A service that serves `one`; every test brings it back there."""
    stub = StubService(tmp_path_factory.mktemp("experiment") / "root")
    first = stub.stage("one")
    change(stub, "deploy", first)
    yield stub, first
    stub.kill()


@pytest.fixture
def trial(deployed):
    """The service, its base, and the release that is tried on it."""
    service, first = deployed
    service.wait_for_mark("one")
    wait_until(lambda: service.host.lock.holder() is None)
    return service, first, service.stage("two")


def test_returns_at_expiry(trial):
    service, first, second = trial
    outcome, _ = change(service, "experiment", second, first, acceptance=ACCEPTS, experiment_seconds=2.5)
    assert outcome.status == "committed"
    assert f"an experiment that returns to {first.id} at 20" in outcome.message
    assert f"ddtoolkit rollback {service.name} ends it now" in outcome.hint
    assert service.mark() == "two"
    shown = status(service.layout, service.name).experiment
    assert (shown["release"], shown["base"], shown["timed"]) == (second.id, first.id, True)
    assert 0 < shown["remaining"] <= 2.5
    service.wait_for_mark("one", 20)
    wait_until(lambda: history.read(service.paths)[-1].kind == "return")
    entry = history.read(service.paths)[-1]
    assert (entry.kind, entry.outcome, entry.release, entry.who) == (
        "return",
        "committed",
        first.id,
        "ann@desk",
    )
    assert [(item.key, item.old, item.new) for item in entry.changes] == [("mark", "two", "one")]
    assert service.host.store.current() == first
    assert status(service.layout, service.name).experiment is None


def test_what_failed_without_counting_is_kept_in_history_and_status(trial):
    service, first, second = trial
    checks = [
        {"name": "acceptance_length", "status": "failed", "category": "performance", "detail": "2 is not 3"},
        {"name": "lossless", "status": "passed", "category": "correctness"},
    ]
    report = json.dumps({"mode": "experiment", "verdict": "accepted", "checks": checks})
    slower = Acceptance(("/bin/sh", "-c", f"echo '{report}' > \"$4\"", "sh"), {}, 10.0)
    outcome, _ = change(service, "experiment", second, first, acceptance=slower, experiment_seconds=60)
    assert outcome.uncounted == ("acceptance_length: 2 is not 3",)
    assert history.read(service.paths)[-1].uncounted == outcome.uncounted
    accepted = status(service.layout, service.name).accepted
    assert (accepted["mode"], accepted["not_counted"]) == ("experiment", ["acceptance_length: 2 is not 3"])
    change(service, "rollback", first, second)
    assert history.read(service.paths)[-1].uncounted == ()


def test_refused_experiment_is_rolled_back_and_not_timed(trial):
    service, first, second = trial
    outcome, _ = change(service, "experiment", second, first, acceptance=REFUSES, experiment_seconds=60)
    assert outcome.status == "rolled_back"
    assert read_experiment(service.paths) is None


def test_new_deploy_cancels_it_and_falls_back_to_its_base(trial):
    service, first, second = trial
    change(service, "experiment", second, first, experiment_seconds=60)
    timer = read_experiment(service.paths).timer["pid"]
    third = service.stage("three")
    outcome, _ = change(service, "deploy", third, second, acceptance=REFUSES)
    assert (outcome.status, outcome.serving) == ("rolled_back", first.id)
    assert service.mark() == "one"
    assert read_experiment(service.paths) is None
    wait_until(lambda: not os.path.exists(f"/proc/{timer}"))  # noqa: PTH110


def test_dead_timer_is_started_again_by_the_next_command(trial):
    service, first, second = trial
    asked = request("experiment", second, first, experiment_seconds=1.0)
    with hold(service.layout, service.name, "experiment"):  # in which it does not return
        list(follow(begin(service.layout, service.name, asked)))
        os.kill(read_experiment(service.paths).timer["pid"], signal.SIGKILL)
        wait_until(lambda: not read_experiment(service.paths).timed)
        assert status(service.layout, service.name).experiment["timed"] is False
    with hold(service.layout, service.name, "next"):
        assert read_experiment(service.paths).timed
        time.sleep(0.1)
    service.wait_for_mark("one", 20)
    wait_until(lambda: history.read(service.paths)[-1].kind == "return")


def test_waits_while_someone_else_is_at_work(trial):
    service, first, second = trial
    asked = request("experiment", second, first, experiment_seconds=0.1)
    with hold(service.layout, service.name, "something long"):
        for _ in follow(begin(service.layout, service.name, asked)):
            pass
        time.sleep(1.5)
        assert service.mark() == "two"
    service.wait_for_mark("one", 20)


def test_stopped_service_stays_stopped_at_expiry(trial):
    service, first, second = trial
    with hold(service.layout, service.name, "experiment"):  # in which it does not return
        for asked in (request("experiment", second, first, experiment_seconds=0.5), request("stop")):
            list(follow(begin(service.layout, service.name, asked)))
    wait_until(lambda: history.read(service.paths)[-1].kind == "return", 25)
    assert service.host.store.current() == first
    assert service.mark() is None
    assert "stopped as before" in history.read(service.paths)[-1].message
