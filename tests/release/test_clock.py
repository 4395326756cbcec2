"""The host's clock is set by an hour in the middle, as NTP does at boot: what was begun keeps its time."""

import json
import os
import time

import pytest
from changes import change, request
from stub_service import StubService, wait_until

from toolkit.release import history, lock
from toolkit.release.controller import begin, follow, hold, result
from toolkit.release.experiment import Experiment, prolong, read_experiment, set_timer, write_experiment
from toolkit.release.lock import Lock
from toolkit.release.view import status
from toolkit.service import systemd_status
from toolkit.service.processes import ProcessId, boot_id
from toolkit.service.started import Started
from toolkit.service.unit import RestartPolicy

HOUR = 3600.0
# What every process that is begun from here on has for a clock.
SET = """
import os, time
real = time.time
def shifted():
    with open(os.environ["TEST_CLOCK"]) as file:
        return real() + float(file.read())
time.time = shifted
"""


@pytest.fixture
def set_clock(tmp_path, monkeypatch):
    """Sets the clock of this process and of those that it begins, by seconds ahead of the real one."""
    real, file, folder = time.time, tmp_path / "clock", tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SET)

    def ahead(seconds):
        new = file.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(file)

    ahead(0.0)
    monkeypatch.setenv("TEST_CLOCK", str(file))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setattr(time, "time", lambda: real() + float(file.read_text()))
    return ahead


@pytest.fixture
def trial(tmp_path):
    """A service that serves `one`, and a release to try on it."""
    stub = StubService(tmp_path / "root")
    first = stub.stage("one")
    change(stub, "deploy", first)
    yield stub, first, stub.stage("two")
    stub.kill()


def test_an_experiment_lasts_its_time_and_can_be_prolonged(set_clock, trial):
    service, first, second = trial
    change(service, "experiment", second, first, experiment_seconds=3.0)
    began = time.monotonic()
    set_clock(HOUR)
    time.sleep(0.8)
    assert service.mark() == "two"
    shown = status(service.layout, service.name)
    assert 0 < shown.experiment["remaining"] < 3
    assert abs(shown.experiment["until"] - time.time() - shown.experiment["remaining"]) < 0.5
    assert shown.since is not None
    assert 0 <= time.time() - shown.since < 60
    set_clock(-HOUR)
    prolong(service.paths, read_experiment(service.paths), 4.0)
    time.sleep(max(3.4 - (time.monotonic() - began), 0))
    assert service.mark() == "two"
    service.wait_for_mark("one", 20)
    assert time.monotonic() - began < 20
    wait_until(lambda: history.read(service.paths)[-1].kind == "return")
    assert [entry.kind for entry in history.read(service.paths)] == ["deploy", "experiment", "return"]


def test_the_words_of_a_server_that_failed_are_told_though_the_clock_was_set_back(set_clock, trial):
    service, first, _ = trial
    bad = service.stage("bad", "--load", "30", "--exit-after", "1.5", restart=RestartPolicy(burst=1))
    with hold(service.layout, service.name, "test deploy"):
        folder = begin(service.layout, service.name, request("deploy", bad, first))
        for event in follow(folder):
            if (event.step, event.state) == ("ready", "begin"):
                set_clock(-HOUR)
    assert result(folder).status == "rolled_back"
    assert result(folder).log != ()


def test_a_process_seems_no_older_than_its_unit_file_once_the_clock_was_set_back(set_clock):
    now = time.time()
    facts = {"ExecMainStartTimestampMonotonic": str(int((time.monotonic() + 0.1) * 1e6))}
    started = Started("r", now, "", "", "", 0, 0, 1.0, 1.0)
    assert not systemd_status._older(facts, started, now - 0.1)
    assert systemd_status._older(facts, started, now + 5)
    set_clock(-HOUR)
    assert not systemd_status._older(facts, started, now - 0.1)


def timed(paths, *, started, until, timer=None):
    experiment = Experiment("b", "a", "ann@desk", started, until, timer=timer)
    write_experiment(paths, experiment)
    return read_experiment(paths)


def test_after_a_reboot_the_clock_tells_what_is_left_within_the_experiments_time(set_clock, service):
    now = time.time()
    other = {"pid": 1, "start": 1, "boot": "another", "deadline": 5.0, "rough": False}
    lasts = {"started": now - 100, "until": now + 500, "timer": other}
    assert 499 < timed(service.paths, **lasts).remaining <= 500
    set_clock(-HOUR)
    assert timed(service.paths, **lasts).remaining == 600
    # The clock is set right once the timer waits again: by then it may only come earlier.
    mine = ProcessId(os.getpid(), 1, boot_id())
    waiting = set_timer(service.paths, timed(service.paths, **lasts), mine)
    assert 599 < waiting.remaining <= 600
    set_clock(0)
    assert 499 < waiting.remaining <= 500
    set_clock(-10 * HOUR)
    assert waiting.remaining <= 600
    # A timer that died and was begun again on the same boot goes on with what there was.
    assert set_timer(service.paths, waiting, mine).timer["rough"]


@pytest.mark.parametrize("deadline", ["soon", None])
def test_a_damaged_deadline_is_none(service, deadline):
    now = time.time()
    timer = {"pid": 1, "start": 1, "boot": boot_id(), "deadline": deadline}
    assert 59 < timed(service.paths, started=now, until=now + 60, timer=timer).remaining <= 60


def test_a_holder_elsewhere_that_lives_is_not_taken_over_since_the_clock_was_set(
    set_clock, service, monkeypatch
):
    monkeypatch.setattr(lock, "HEARTBEAT", 1.0)
    held = service.host.lock
    with held.hold("deploy"):
        value = json.loads(service.paths.lock.read_text()) | {"host": "elsewhere", "process": None}
        service.paths.lock.write_text(json.dumps(value))
        set_clock(HOUR)
        with pytest.raises(lock.LockedError, match="is locked by"), Lock(service.paths, "stub").hold("swap"):
            pass
    service.paths.lock.write_text(json.dumps(value))
    monkeypatch.setattr(lock, "HEARTBEAT", 0.3)
    with held.hold("swap") as taken:
        assert taken.taken_over.command == "deploy"


def test_a_holder_of_this_boot_is_known_by_its_process_whatever_the_machine_is_called(service):
    with service.host.lock.hold("deploy"):
        value = json.loads(service.paths.lock.read_text()) | {"host": "elsewhere"}
        service.paths.lock.write_text(json.dumps(value))
        os.utime(service.paths.lock, (1, 1))
        assert not service.host.lock.stale(service.host.lock.holder())
