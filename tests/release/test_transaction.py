"""The straight line, and each way it ends otherwise, against a real process."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from changes import change, request, steps
from stub_service import ACCEPTS, REFUSES, SERVER, StubService, wait_until

from toolkit.errors import RolledBackError, ServiceDownError, ToolkitError
from toolkit.files import make_private, replace_file
from toolkit.release import ending, history
from toolkit.release.controller import begin
from toolkit.release.experiment import Experiment, write_experiment
from toolkit.release.journal import create_journal
from toolkit.release.request import Acceptance
from toolkit.service.unit import SecretSource


def test_first_deploy_then_second(service):
    """L1, L2: /health answers at once and does not count; tokens come after a second and are waited for."""
    first = service.stage("one", "--load", "1.0")
    outcome, events = change(service, "deploy", first, acceptance=service.acceptance(requests=2))
    assert outcome.status == "committed"
    # There is no old one to be stopped.
    stop = next(event for event in events if (event.step, event.state) == ("stop_old", "begin"))
    assert stop.message == "seeing that nothing serves"
    forward = ["preflight", "stop_old", "switch", "start_new", "ready", "acceptance", "commit", "outcome"]
    assert steps(events) == forward
    assert [event.message for event in events if event.state == "progress"] == ["request 0", "request 1"]
    ready = next(event for event in events if (event.step, event.state) == ("ready", "done"))
    assert ready.data["load_seconds"] >= 1
    assert service.mark() == "one"
    assert service.host.store.current() == first
    assert first.acceptance["marks"] == ["one"]
    assert outcome.report == str(first.path / "acceptance.json")
    second = service.stage("two")
    outcome, _ = change(service, "deploy", second, first, acceptance=ACCEPTS)
    assert (outcome.status, outcome.exit_code, outcome.serving) == ("committed", 0, second.id)
    assert service.mark() == "two"
    assert [entry.outcome for entry in history.read(service.paths)] == ["committed", "committed"]
    assert 0 < outcome.seconds["downtime"] <= outcome.seconds["total"]
    outcome.raise_for_status()
    # L6: stop-then-start, as the server's own output has it.
    lines = service.paths.log.read_text().splitlines()
    order = [line for line in lines if "ended by SIGTERM" in line or line.startswith("serving")]
    assert (order[0], order[2]) == ("serving one", "serving two")
    assert "ended by SIGTERM" in order[1]


def test_the_time_without_a_server_leaves_out_a_candidate_that_served(service):
    first = service.stage("one")
    change(service, "deploy", first)
    slow = service.acceptance(sleep=3.0, reasons=["worse"])
    outcome, events = change(service, "swap", service.stage("two"), first, acceptance=slow)
    assert outcome.status == "rolled_back"
    judged = next(event for event in events if (event.step, event.state) == ("acceptance", "failed"))
    assert outcome.seconds["acceptance"] >= 3.0, judged
    assert 0 < outcome.seconds["downtime"] <= outcome.seconds["total"] - outcome.seconds["acceptance"]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A service that serves `one`; every test that uses it leaves it so."""
    stub = StubService(tmp_path_factory.mktemp("deployed") / "root")
    first = stub.stage("one")
    change(stub, "deploy", first, acceptance=ACCEPTS)
    yield stub, first
    stub.kill()


@pytest.fixture
def base(deployed):
    stub, first = deployed
    assert (stub.mark(), stub.host.store.current()) == ("one", first)
    return deployed


def test_refused_release_is_rolled_back(base):
    service, first = base
    second = service.stage("two")
    outcome, events = change(service, "swap", second, first, acceptance=REFUSES, base_acceptance=REFUSES)
    assert (outcome.status, outcome.exit_code, outcome.serving) == ("rolled_back", 5, first.id)
    assert "too slow" in outcome.message
    assert service.mark() == "one"
    assert service.host.store.current() == first
    back = ["stop_new", "switch_back", "start_old", "ready_old", "outcome"]
    assert steps(events)[-5:] == back
    assert steps(events, "failed") == ["acceptance", "acceptance_old"]
    assert outcome.report == str(second.path / "acceptance.refused.json")
    assert second.acceptance is None
    last = history.read(service.paths)[-1]
    assert outcome.reason == last.reason == "acceptance refused it: too slow"
    assert (last.message, last.outcome) == (f"{last.reason}; {first.id} serves again", "rolled_back")
    with pytest.raises(RolledBackError, match="too slow"):
        outcome.raise_for_status()


def test_unit_that_exits_at_once_fails_with_its_last_lines(base):
    """L8: long before the load timeout, and the lines are the new release's own."""
    service, first = base
    second = service.stage("two", "--exit-at-once", "3", load_timeout=60.0)
    begin = time.monotonic()
    outcome, _ = change(service, "deploy", second, first)
    assert time.monotonic() - begin < 15
    assert outcome.status == "rolled_back"
    assert "ended with status 3 before its first token" in outcome.message
    assert any("cannot load the model: two" in line for line in outcome.log)
    assert not any("serving one" in line for line in outcome.log)
    assert service.mark() == "one"


def test_load_timeout_is_the_units(base):
    service, first = base
    second = service.stage("two", "--load", "60", load_timeout=2.0)
    outcome, _ = change(service, "deploy", second, first)
    assert outcome.status == "rolled_back"
    assert "no token within the load timeout of 2 s; last: /generate answered 503" in outcome.message
    assert "load_timeout" in outcome.hint


@pytest.mark.parametrize("fault", ["--die-after", "--hang-after"])
def test_server_that_gives_up_after_some_requests_is_refused(base, fault):
    """L3: readiness takes one token, acceptance sends more."""
    service, first = base
    second = service.stage("two", fault, "4")
    outcome, _ = change(service, "deploy", second, first, acceptance=service.acceptance(requests=9))
    assert outcome.status == "rolled_back"
    assert "no token" in outcome.message
    assert service.mark() == "one"


def test_failed_first_deploy_leaves_it_stopped(service):
    first = service.stage("one", "--grandchild", "session")
    outcome, _ = change(service, "deploy", first, acceptance=REFUSES)
    assert (outcome.status, outcome.exit_code, outcome.serving) == ("first_failed", 1, None)
    assert "no earlier release, the service is stopped" in outcome.message
    assert service.mark() is None
    assert service.host.store.current() is None
    assert service.host.process_status().state == "stopped"


def test_both_broken_is_service_down(service):
    flag = service.layout.root / "broken"
    code = f'[ -e {flag} ] && exit 4; exec "$@"'
    good = service.unit("x", "--mark", "one").argv
    first = service.stage("one", argv=("/bin/sh", "-c", code, "sh", *good))
    second = service.stage("two", "--exit-at-once", "3")
    change(service, "deploy", first)
    flag.touch()
    outcome, _ = change(service, "deploy", second, first)
    assert (outcome.status, outcome.exit_code, outcome.serving) == ("rollback_failed", 6, None)
    assert f"returning to {first.id} failed too" in outcome.message
    assert "ddtoolkit start stub" in outcome.hint
    with pytest.raises(ServiceDownError):
        outcome.raise_for_status()


def test_rollback_to_a_broken_release_restores_the_better_one(service):
    """L7."""
    flag = service.layout.root / "broken"
    good = service.unit("x", "--mark", "one").argv
    first = service.stage("one", argv=("/bin/sh", "-c", f'[ -e {flag} ] && exit 4; exec "$@"', "sh", *good))
    second = service.stage("two")
    change(service, "deploy", first)
    change(service, "deploy", second, first)
    flag.touch()
    outcome, _ = change(service, "rollback", first, second, acceptance=ACCEPTS)
    assert outcome.status == "rolled_back"
    assert "ended with status 4" in outcome.message
    assert f"{second.id} serves again" in outcome.message
    assert service.mark() == "two"


def test_busy_port_of_another_release_is_refused_before_anything(base):
    service, first = base
    pid = service.host.process_status().pid
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome, events = change(service, "deploy", service.stage("two", port=port), first)
    assert (outcome.status, outcome.exit_code) == ("not_started", 1)
    assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()}" in outcome.message
    assert "nothing was changed" in outcome.message
    assert "stop_old" not in steps(events, "begin")
    assert service.host.process_status().pid == pid


def test_a_server_that_took_the_port_meanwhile_is_not_taken_for_the_release(service):
    """It was free when it was looked at; both may bind it before one listens, and the other one answers."""
    release = service.stage("one", "--bind-after", "60")
    other = []

    def take():
        wait_until(lambda: service.host.process_status().pid is not None)
        command = [sys.executable, "-S", SERVER, "--port", str(service.port), "--mark", "another"]
        other.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    thief = threading.Thread(target=take)
    thief.start()
    try:
        outcome, _ = change(service, "deploy", release, acceptance=ACCEPTS)
        assert service.mark() == "another"
    finally:
        thief.join()
        other[0].kill()
        other[0].wait()
    assert (outcome.status, outcome.serving) == ("first_failed", None)
    assert f"port {service.port} on 127.0.0.1 was taken by process {other[0].pid}" in outcome.message
    assert service.host.store.current() is None


def test_a_server_that_was_started_again_while_it_was_judged_is_refused(service):
    file = service.layout.root / "exit"
    release = service.stage("one", "--exit-when", str(file))
    ends_it = f'touch {file}; while [ -e {file} ]; do sleep 0.05; done; sleep 0.5; echo "{{}}" > "$4"'
    outcome, _ = change(
        service, "deploy", release, acceptance=Acceptance(("/bin/sh", "-c", ends_it, "sh"), {}, 10.0)
    )
    assert outcome.status == "first_failed"
    assert "the server ended with status 9 while it was judged" in outcome.message


def test_missing_secret_is_refused_before_anything(base):
    service, first = base
    pid = service.host.process_status().pid
    second = service.stage(
        "two", secrets={"api-key": SecretSource(env="NO_SUCH_VARIABLE")}, secrets_file="/nowhere"
    )
    outcome, _ = change(service, "deploy", second, first)
    assert outcome.status == "not_started"
    assert "NO_SUCH_VARIABLE" in outcome.message
    assert service.host.process_status().pid == pid


def test_base_stopped_on_request_stays_stopped_after_a_failure(service):
    first, second = service.stage("one"), service.stage("two")
    change(service, "deploy", first)
    change(service, "stop", None)
    outcome, _ = change(service, "deploy", second, first, acceptance=REFUSES)
    assert outcome.status == "rolled_back"
    assert "stopped, as it was before" in outcome.message
    assert service.mark() is None
    assert service.host.store.current() == first


def test_base_that_had_crashed_is_brought_back(base):
    service, first = base
    second = service.stage("two")
    service.kill()
    outcome, _ = change(service, "deploy", second, first, acceptance=REFUSES)
    assert (outcome.status, outcome.serving) == ("rolled_back", first.id)
    assert service.mark() == "one"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"crash": True},
            "acceptance ended with status 1 without a report: RuntimeError: the acceptance program",
        ),
        ({"sleep": 60, "time_limit": 0.5}, "acceptance did not end within 0.5 s"),
    ],
)
def test_acceptance_that_breaks_is_a_refusal(base, settings, said):
    service, first = base
    second = service.stage("two")
    outcome, _ = change(service, "deploy", second, first, acceptance=service.acceptance(**settings))
    assert outcome.status == "rolled_back"
    assert said in outcome.message
    assert service.mark() == "one"


def test_secrets_reach_server_and_acceptance_and_nothing_else(service, monkeypatch):
    """R2, R6."""
    key = 'pa$1wor$D"\\ {"a": "b c"} \u00e9'
    monkeypatch.setenv("STUB_KEY", key)
    release_id = service.host.store.new_id("0" * 64)
    secrets_file = service.host.secrets_file(release_id)
    first = service.host.store.stage(
        release_id,
        profile={},
        manifest={},
        unit=service.unit(
            release_id,
            "--config",
            str(secrets_file),
            secrets={"api-key": SecretSource(env="STUB_KEY")},
            secrets_file=str(secrets_file),
        ),
    )
    seen = service.layout.root / "seen"
    shell = f'printf %s "$DDTOOLKIT_API_KEY" > {seen}; echo "{{}}" > "$4"'
    acceptance = type(ACCEPTS)(("/bin/sh", "-c", shell, "sh"))
    outcome, _ = change(service, "deploy", first, acceptance=acceptance)
    assert outcome.status == "committed", outcome.message
    assert seen.read_text() == key
    seen.unlink()
    assert secrets_file.stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv("STUB_KEY")
    outcome, _ = change(service, "restart", first)
    assert outcome.status == "committed", outcome.message
    with_key = [
        path for path in service.layout.root.rglob("*") if path.is_file() and b"pa$1wor" in path.read_bytes()
    ]
    assert with_key == [secrets_file]
    pid = service.host.process_status().pid
    assert b"pa$1" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_prune_keeps_what_may_be_returned_to(service):
    made = [service.stage(str(number)) for number in range(5)]
    service.host.store.switch(made[4].id)
    for release in made:
        replace_file(make_private(service.paths.state / "secrets") / f"{release.id}.yaml", b"")
    trial = Experiment(made[3].id, made[1].id, "a@b", started=0.0, until=1.0)
    write_experiment(service.paths, trial)
    ending.prune(service.host, request("deploy", made[4], made[3], keep_releases=2))
    assert service.host.store.all() == [made[1], made[3], made[4]]
    kept = {path.stem for path in (service.paths.state / "secrets").iterdir()}
    assert kept == {made[1].id, made[3].id, made[4].id}


def test_begin_refuses_an_unrecovered_transaction(service):
    service.paths.transaction.mkdir()
    (service.paths.transaction / "request.json").touch()
    create_journal(service.paths.transaction)
    with pytest.raises(ToolkitError, match="interrupted"):
        begin(service.layout, service.name, request("deploy", service.stage("one")))
