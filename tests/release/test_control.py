"""start, stop, restart, status and logs as commands use them."""

import os
import signal
import threading
import time

import pytest
from changes import change
from stub_service import ACCEPTS

from toolkit.errors import ConfigError, LockedError
from toolkit.release import control, history
from toolkit.release.controller import hold
from toolkit.release.view import status


def test_nothing_deployed(service):
    shown = status(service.layout, service.name)
    assert (shown.state, shown.release, shown.lock, shown.transaction) == ("absent", None, None, None)
    for verb in (control.start, control.stop, control.restart):
        with pytest.raises(ConfigError, match="stub: nothing is deployed"):
            verb(service.layout, service.name)
    with pytest.raises(ConfigError, match="has not written a log yet"):
        control.logs(service.layout, service.name)


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
