"""start, stop, restart, status and logs as commands use them."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from changes import change, request
from stub_service import ACCEPTS, wait_until

from toolkit.deploy.testing import run_test
from toolkit.deploy.watch import describe_status
from toolkit.errors import ConfigError, LockedError, ToolkitError
from toolkit.release import control, history
from toolkit.release.controller import begin, follow, hold, result
from toolkit.release.journal import read_journal
from toolkit.release.locate import Deployed
from toolkit.release.steps import Steps
from toolkit.release.view import status
from toolkit.service.supervision import read_supervision


def test_nothing_deployed(service):
    shown = status(service.layout, service.name)
    assert (shown.state, shown.release, shown.lock, shown.transaction) == ("absent", None, None, None)
    for verb in (control.start, control.stop, control.restart):
        with pytest.raises(ConfigError, match="stub: nothing is deployed"):
            verb(service.layout, service.name)
    with pytest.raises(ConfigError, match="has not written a log yet"):
        control.logs(service.layout, service.name)


def test_a_test_of_another_server_on_the_port_says_whose_it_is(service):
    """A server that has not bound its port yet, or could not, beside one that took it."""
    release = service.stage("late", "--bind-after", "60")
    service.host.store.switch(release.id)
    service.host.manager(release.unit).start(release.path)
    server = service.host.process_status().pid
    with socket.create_server((release.unit.host, release.unit.port)):
        held = rf"stub: port {release.unit.port} on \S+ is held by process {os.getpid()} \(.*\)"
        with pytest.raises(
            ToolkitError, match=rf"{held}, which is not its server \(pid {server}\)"
        ) as caught:
            run_test(Deployed(service.name, service.layout), lambda _: None)
    assert caught.value.hint == "stop what holds it; then: ddtoolkit restart stub"


def test_a_test_beside_a_service_that_is_stopped_names_who_holds_its_port(service):
    release = service.stage("one")
    service.host.store.switch(release.id)
    held = rf"is held by process {os.getpid()} \(.+\), which is not its server: stub is stopped$"
    with (
        socket.create_server((release.unit.host, release.unit.port)),
        pytest.raises(ToolkitError, match=held) as caught,
    ):
        run_test(Deployed(service.name, service.layout), lambda _: None)
    assert caught.value.hint == "stop what holds it; then: ddtoolkit start stub"
    with pytest.raises(ToolkitError, match="stub: there is nothing to test: it is stopped"):
        run_test(Deployed(service.name, service.layout), lambda _: None)


def test_a_transaction_that_ends_while_it_is_looked_at_is_not_taken_for_one_that_died(service, monkeypatch):
    monkeypatch.setattr("toolkit.release.controller._spawn", lambda folder, **_: None)
    folder = begin(service.layout, service.name, request("restart", service.stage("one")))
    flock = service.host.lock.hold_transaction()

    def ends_then(path):
        before = read_journal(path)
        os.close(flock)
        return before

    monkeypatch.setattr("toolkit.release.controller.read_journal", ends_then)
    assert result(folder) is None


def told(service):
    return dict(describe_status(status(service.layout, service.name).to_json()))


def test_a_first_deploy_that_is_being_prepared_is_told(service):
    before = time.time()
    with hold(service.layout, service.name, "deploy profile stub"):
        shown = status(service.layout, service.name)
        assert shown.state == "deploying"
        assert shown.since == pytest.approx(before, abs=5)
        words = told(service)
        assert words["state"].startswith("deploying since 20")
        assert re.fullmatch(
            r"first deploy by .* since \d{4}-.*Z \(\d s\), being prepared .*: nothing is started yet",
            words["under way"],
        )
    assert told(service) == {"state": "absent"}


def test_a_first_deploy_tells_its_step_and_since_when(service, monkeypatch):
    first = service.stage("one", "--load", "1.5")
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr("toolkit.release.controller._spawn", lambda folder, *, recover: None)
        patched.setattr(time, "time", lambda: now)
        folder = begin(service.layout, service.name, request("deploy", first))
        flock = service.host.lock.hold_transaction()
        steps = Steps(folder, lambda since: [])
        with steps.step("preflight", "checking the release"):
            words = told(service)
    assert words["state"].startswith("deploying since 20")
    assert re.fullmatch(
        r"first deploy by ann@desk since .*Z \(0 s\), for 0 s at step preflight \(checking the release\)",
        words["under way"],
    )
    os.close(flock)
    assert told(service)["last change"].startswith(
        "deploy by ann@desk was interrupted at step preflight; the"
    )

    with hold(service.layout, service.name, "deploy profile stub"):
        begin(service.layout, service.name, request("deploy", first))
        # What is started is not accepted yet, whatever the process manager says of it.
        wait_until(lambda: "at step ready (waiting for a real token)" in told(service).get("under way", ""))
        assert status(service.layout, service.name).state in ("starting", "running")
        list(follow(service.paths.transaction))
    assert {"under way", "last change"} & set(told(service)) == set()


def test_life_of_a_service(service):
    first = service.stage("one")
    change(service, "deploy", first, acceptance=ACCEPTS)
    shown = status(service.layout, service.name)
    assert (shown.state, shown.healthy, shown.release) == ("running", True, first.id)
    assert shown.pid == service.host.process_status().pid
    assert shown.url == f"http://127.0.0.1:{service.port}"
    assert shown.survives_reboot is False
    assert any("reboot" in line for line in shown.warnings)
    assert shown.transaction["outcome"] == "committed"
    assert shown.accepted == {}

    outcome = control.stop(service.layout, service.name)
    assert (outcome.status, outcome.serving) == ("committed", None)
    shown = status(service.layout, service.name)
    assert (shown.state, shown.pid, shown.log) == ("stopped", None, ())

    outcome = control.start(service.layout, service.name)
    assert (outcome.status, outcome.serving) == ("committed", first.id)
    pid = service.host.process_status().pid
    assert control.start(service.layout, service.name).status == "committed"
    assert service.host.process_status().pid == pid
    assert control.restart(service.layout, service.name, command="restart stub").status == "committed"
    assert service.host.process_status().pid != pid
    assert service.mark() == "one"
    kinds = [(entry.kind, entry.outcome) for entry in history.read(service.paths)]
    assert kinds == [(kind, "committed") for kind in ("deploy", "stop", "start", "start", "restart")]

    os.kill(service.host.process_status().pid, signal.SIGKILL)
    service.wait_for_mark("one")
    assert status(service.layout, service.name).restarts == 1


def test_failed_restart_says_so_with_the_last_lines(service):
    flag = service.layout.root / "broken"
    good = service.unit("x", "--mark", "one").argv
    code = f'[ -e {flag} ] && echo "no memory" && exit 4; exec "$@"'
    first = service.stage("one", argv=("/bin/sh", "-c", code, "sh", *good))
    change(service, "deploy", first)
    flag.touch()
    outcome = control.restart(service.layout, service.name)
    assert (outcome.status, outcome.exit_code, outcome.serving) == ("failed", 1, None)
    assert "ended with status 4" in outcome.message
    assert "no memory" in outcome.log
    end = time.monotonic() + 10
    while (shown := status(service.layout, service.name)).state != "failed" and time.monotonic() < end:
        time.sleep(0.05)
    assert shown.exit_status == 4
    assert "no memory" in shown.log


def test_a_refused_restart_says_that_what_serves_was_not_touched(service):
    first = service.stage("one")
    change(service, "deploy", first)
    (first.path / "profile.json").write_text(json.dumps(first.profile | {"mark": "by hand"}))
    outcome = control.restart(service.layout, service.name)
    assert outcome.status == "failed"
    assert outcome.message.endswith("; what serves was not touched")
    assert service.mark() == "one"
    control.stop(service.layout, service.name)
    assert "not touched" not in control.restart(service.layout, service.name).message


def port_taken(service, first):
    return socket.create_server(("127.0.0.1", service.port))


def program_gone(service, first):
    Path(first.unit.argv[0]).unlink()
    return contextlib.nullcontext()


@pytest.mark.parametrize("fault", [port_taken, program_gone])
def test_a_start_that_came_to_nothing_shows_nothing_of_the_run_before(service, fault):
    program = service.layout.root / "python"
    program.symlink_to(sys.executable)
    first = service.stage("one", argv=(str(program), *service.unit("x", "--mark", "one").argv[1:]))
    change(service, "deploy", first)
    control.stop(service.layout, service.name)
    with fault(service, first):
        outcome = control.start(service.layout, service.name)
    assert (outcome.status, outcome.log) == ("failed", ())
    events = read_journal(service.paths.transaction)
    assert [
        event.data["log"] for event in events if (event.step, event.state) == ("start_new", "failed")
    ] == [[]]


def test_a_start_of_what_serves_says_that_nothing_was_started(service):
    change(service, "deploy", service.stage("one"))
    outcome = control.start(service.layout, service.name)
    assert (outcome.status, outcome.hint) == ("committed", None)
    assert outcome.message == "it serves already: nothing was started"


def test_a_start_of_what_lost_its_supervisor_says_so_and_what_helps(service):
    change(service, "deploy", service.stage("one"))
    supervisor = read_supervision(service.paths.supervisor).supervisor
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not supervisor.alive())
    pid = service.host.process_status().pid
    outcome = control.start(service.layout, service.name)
    assert (outcome.status, outcome.serving) == ("committed", service.host.store.current().id)
    assert "nothing was started: its supervisor is gone" in outcome.message
    assert outcome.hint.startswith("ddtoolkit restart stub")
    assert (service.mark(), service.host.process_status().pid) == ("one", pid)
    assert control.restart(service.layout, service.name).message == "restarted"
    assert service.host.process_status().supervised
    assert service.mark() == "one"


def test_status_and_logs_take_no_lock_and_changes_do(service):
    change(service, "deploy", service.stage("one"))
    with hold(service.layout, service.name, "deploy profile x"):
        shown = status(service.layout, service.name)
        assert shown.lock["command"] == "deploy profile x"
        assert shown.lock["stale"] is False
        assert any("serving one" in line for line in control.logs(service.layout, service.name))
        with pytest.raises(LockedError, match="deploy profile x"):
            control.stop(service.layout, service.name)
    assert service.mark() == "one"


def test_logs_follow_until_told(service):
    change(service, "deploy", service.stage("one", "--chatter", "8"))
    over = threading.Event()
    lines = control.logs(service.layout, service.name, lines=1, follow=True, ended=over.is_set)
    assert next(lines)
    threading.Timer(0.3, service.mark).start()
    assert next(lines) == "x" * 8
    over.set()
    assert list(lines) == []


def test_silent_server_is_warned_of(service):
    change(service, "deploy", service.stage("one", host="127.0.0.1"))
    pid = service.host.process_status().pid
    os.kill(pid, signal.SIGSTOP)
    shown = status(service.layout, service.name)
    os.kill(pid, signal.SIGCONT)
    assert shown.healthy is False
    assert shown.state == "starting"


def test_open_address_without_a_key_is_warned_of_in_every_status(service):
    change(service, "deploy", service.stage("one", host="0.0.0.0"))  # noqa: S104
    shown = status(service.layout, service.name)
    assert any("no API key is set" in line for line in shown.warnings)
    assert shown.url == f"http://127.0.0.1:{service.port}"
