"""A change that was to end an experiment and came to nothing, and an end that was killed."""

import pytest
from changes import change, request
from stub_service import ACCEPTS, REFUSES, StubService, wait_until
from test_recovery import die_at, recover

from toolkit.release import history
from toolkit.release.control import stop
from toolkit.release.experiment import prolong, read_experiment
from toolkit.release.request import Acceptance
from toolkit.release.view import status

TRIED = Acceptance(("/bin/sh", "-c", """echo '{"mode": "experiment"}' > "$4\"""", "sh"), {}, 10.0)


@pytest.fixture
def trial(tmp_path):
    """A service that tries `two`, for an hour, over `one`."""
    stub = StubService(tmp_path / "root")
    first, second = stub.stage("one"), stub.stage("two")
    change(stub, "deploy", first)
    change(stub, "experiment", second, first, experiment_seconds=3600)
    yield stub, first, second
    stub.kill()


def goes_on(service, first, second, outcome):
    """The experiment serves, and still returns by itself."""
    assert (outcome.status, service.mark()) == ("rolled_back", "two")
    experiment = read_experiment(service.paths)
    assert (experiment.release, experiment.base, experiment.timed) == (second.id, first.id, True)
    assert outcome.message.endswith(f"{second.id} serves again, an experiment that {experiment.ends}")
    assert 3500 < experiment.remaining < 3600
    prolong(service.paths, experiment, 0.3)
    service.wait_for_mark("one", 20)
    wait_until(lambda: history.read(service.paths)[-1].kind == "return")
    assert read_experiment(service.paths) is None


def test_a_rollback_that_is_refused_leaves_it_on_trial(trial):
    service, first, second = trial
    outcome, _ = change(service, "rollback", first, second, acceptance=REFUSES)
    goes_on(service, first, second, outcome)


@pytest.mark.parametrize("line", [3, 7, 11])
def test_a_rollback_that_is_killed_leaves_it_on_trial(trial, monkeypatch, line):
    service, first, second = trial
    asked = request("rollback", first, second, acceptance=ACCEPTS)
    assert die_at(monkeypatch, service, asked, line)
    goes_on(service, first, second, recover(service))


def test_one_that_is_killed_while_it_is_put_on_trial_again(trial, monkeypatch):
    service, first, second = trial
    asked = request("rollback", first, second, acceptance=REFUSES)
    events = [
        "preflight",
        "stop_old",
        "switch",
        "start_new",
        "ready",
        "acceptance",
        "stop_new",
        "switch_back",
    ]
    assert die_at(monkeypatch, service, asked, 2 * len(events) + 2)  # at the beginning of the step experiment
    assert read_experiment(service.paths) is not None
    goes_on(service, first, second, recover(service))


def test_a_rollback_ends_it(trial):
    service, first, second = trial
    outcome, _ = change(service, "rollback", first, second, acceptance=ACCEPTS)
    assert (outcome.status, service.mark()) == ("committed", "one")
    assert read_experiment(service.paths) is None
    # Nothing of it is left for a later change that comes to nothing.
    outcome, _ = change(service, "rollback", second, first, acceptance=REFUSES)
    assert (outcome.status, service.mark()) == ("rolled_back", "one")
    assert "experiment" not in outcome.message
    assert read_experiment(service.paths) is None


@pytest.mark.parametrize("line", [2, 3, 5, 7, 9, 10])
def test_an_end_that_is_killed_is_gone_on_with(trial, monkeypatch, line):
    """Else what was judged by its correctness alone would serve for good."""
    service, first, second = trial
    assert die_at(monkeypatch, service, request("return", first, second), line)
    outcome = recover(service)
    assert (outcome.status, outcome.serving, service.mark()) == ("committed", first.id, "one")
    assert service.host.store.current() == first
    assert read_experiment(service.paths) is None


@pytest.mark.parametrize("line", [3, 7])
def test_a_stop_after_an_end_that_was_killed_leaves_its_base(trial, monkeypatch, line):
    service, first, second = trial
    assert die_at(monkeypatch, service, request("return", first, second), line)
    events = []
    assert stop(service.layout, service.name, on_event=events.append).status == "committed"
    assert "start_new" not in [event.step for event in events if event.state == "begin"]
    assert (service.mark(), service.host.store.current()) == (None, first)


def test_one_that_cannot_return_is_warned_of(service, tmp_path):
    fault = tmp_path / "fault"
    plain = service.unit("x", "--mark", "one").argv
    unless = ("/bin/sh", "-c", f'test -e {fault} && exit 9; exec "$@"', "sh")
    first, second = service.stage("one", argv=(*unless, *plain)), service.stage("two")
    change(service, "deploy", first)
    change(service, "experiment", second, first, acceptance=TRIED, experiment_seconds=3600)
    warned = "the experiment did not return to its base, and what it tried stays"

    def warnings():
        return [item for item in status(service.layout, service.name).warnings if item.startswith(warned)]

    assert warnings() == []
    fault.touch()  # its base does not come up
    prolong(service.paths, read_experiment(service.paths), 0.3)
    wait_until(lambda: history.read(service.paths)[-1].kind == "return", 20)
    assert history.read(service.paths)[-1].outcome == "rolled_back"
    assert (service.mark(), read_experiment(service.paths)) == ("two", None)
    assert len(warnings()) == 1
    fault.unlink()
    wait_until(lambda: service.host.lock.holder() is None)
    outcome, _ = change(service, "rollback", first, second, acceptance=ACCEPTS)
    assert (outcome.status, warnings()) == ("committed", [])
