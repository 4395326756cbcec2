"""A stop after a change that was killed: nothing is started only to be stopped."""

import pytest
from changes import change, request
from stub_service import ACCEPTS, REFUSES, StubService
from test_recovery import die_at

from toolkit.deploy.watcher import Watcher
from toolkit.layout import Layout
from toolkit.life.uninstall import uninstall
from toolkit.release import history
from toolkit.release.control import start, stop
from toolkit.release.controller import hold
from toolkit.release.locate import Deployed


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    stub = StubService(tmp_path_factory.mktemp("stopping") / "root")
    change(stub, "deploy", stub.stage("first"))
    yield stub
    stub.kill()


def stopped(service):
    """Stop it; the steps that were begun on the way, and how the interrupted change ended."""
    events = []
    outcome = stop(service.layout, service.name, on_event=events.append)
    assert (outcome.status, outcome.message) == ("committed", "stopped, and stays stopped")
    assert service.mark() is None
    assert not service.host.process_status().active
    return [event.step for event in events if event.state == "begin"], history.read(service.paths)[-2]


@pytest.mark.parametrize("line", range(14))
def test_a_stop_after_a_deploy_that_was_killed_starts_nothing(stub, monkeypatch, line):
    base = stub.host.store.current()
    new = stub.stage(f"good {line}")
    asked = request("deploy", new, base, acceptance=ACCEPTS)
    assert die_at(monkeypatch, stub, asked, line)
    begun, entry = stopped(stub)
    assert not {"start_new", "start_old", "ready", "ready_old", "acceptance"} & set(begun), begun
    assert entry.id == asked.id
    current = stub.host.store.current()
    if line < 2:
        assert (entry.outcome, current) == ("not_started", base)
    elif line < 12:
        assert (entry.outcome, current) == ("rolled_back", base)
        assert entry.message.endswith(f"; {base.id} is current again and is to be stopped")
    else:
        assert (entry.outcome, current) == ("committed", new)
    # What is current afterwards is what a start brings back.
    assert start(stub.layout, stub.name).status == "committed"
    assert stub.mark() == current.profile["mark"]


@pytest.mark.parametrize("line", [12, 14, 16, 18])
def test_a_stop_after_one_that_was_killed_on_its_way_back(stub, monkeypatch, line):
    base = stub.host.store.current()
    asked = request("deploy", stub.stage("bad"), base, acceptance=REFUSES)
    assert die_at(monkeypatch, stub, asked, line)
    begun, entry = stopped(stub)
    assert not {"start_old", "ready_old", "acceptance_old"} & set(begun), begun
    assert entry.outcome == "rolled_back"
    assert stub.host.store.current() == base
    start(stub.layout, stub.name)


def test_a_stop_after_a_restart_that_was_killed(stub, monkeypatch):
    current = stub.host.store.current()
    assert die_at(monkeypatch, stub, request("restart", current), 3)
    begun, entry = stopped(stub)
    assert "start_new" not in begun
    assert (entry.kind, entry.outcome) == ("restart", "failed")
    assert entry.message == "the restart was interrupted, and the service is to be stopped"
    start(stub.layout, stub.name)


def test_a_stop_that_was_killed_is_finished_by_the_next(stub, monkeypatch):
    asked = request("stop", stub.host.store.current())
    assert die_at(monkeypatch, stub, asked, 1)
    assert stop(stub.layout, stub.name).message == "it was stopped already, and stays stopped"
    assert not stub.host.process_status().active
    newest = history.read(stub.paths)[-1]
    assert (newest.id, newest.outcome) == (asked.id, "committed")
    start(stub.layout, stub.name)


def test_a_stop_of_what_is_stopped_leaves_no_mark(stub):
    stopped(stub)
    before = history.read(stub.paths)
    assert stop(stub.layout, stub.name).message == "it was stopped already, and stays stopped"
    assert history.read(stub.paths) == before
    assert history.stopped_on_request(stub.paths)
    # One that crashed was not stopped on request: to stop it says that it is to stay so.
    start(stub.layout, stub.name)
    stub.kill()
    assert stopped(stub)[1].kind == "start"
    start(stub.layout, stub.name)


def test_nobody_goes_without_a_server_where_none_ran(stub):
    stop(stub.layout, stub.name)
    outcome, events = change(stub, "deploy", stub.stage("after a stop"), stub.host.store.current())
    assert "downtime" not in outcome.seconds
    assert {event.step: event.message for event in events}["stop_old"] == "seeing that nothing serves"
    outcome, events = change(stub, "deploy", stub.stage("beside one"), stub.host.store.current())
    assert outcome.seconds["downtime"] > 0
    assert {event.step: event.message for event in events}["stop_old"] == "stopping the old release"
    start(stub.layout, stub.name)


def test_a_removal_after_a_deploy_that_was_killed_starts_nothing(service, monkeypatch):
    change(service, "deploy", service.stage("one"))
    base = service.host.store.current()
    asked = request("deploy", service.stage("two"), base, acceptance=ACCEPTS)
    assert die_at(monkeypatch, service, asked, 9)
    events = []
    uninstall(
        Deployed(service.name, Layout(service.layout.root)),
        purge=True,
        wait=0.0,
        watcher=Watcher(event=events.append),
    )
    begun = {event.step for event in events if event.state == "begin"}
    assert "recover" in begun
    assert not {"start_old", "ready_old"} & begun, begun
    assert not service.paths.base.exists()


def test_a_return_from_a_change_that_died_tells_how_long_nobody_served(stub, monkeypatch):
    base = stub.host.store.current()
    assert die_at(monkeypatch, stub, request("deploy", stub.stage("dies"), base, acceptance=ACCEPTS), 6)
    assert not stub.host.process_status().active
    with hold(stub.layout, stub.name, "the next command") as session:
        assert session.recovered.status == "rolled_back"
        assert session.recovered.seconds["downtime"] > 0
    assert stub.mark() == base.profile["mark"]
