"""Transactions under systemd that a lost session, a reboot or a power cut interrupts."""

import re
import shlex
import subprocess
import sys
import time

import pytest

from tests.hosts.stub_on_host import PRELUDE, TOOL, call, enabled, mark, reset

pytestmark = pytest.mark.timeout(300)

BEGIN = """
with hold(service.layout, service.name, "test"):
    release = stage("new", "--load", "8")
    folder = begin(service.layout, service.name, request("deploy", release, store.current()))
"""
WATCH = """
    for event in follow(folder):
        print(event.step, event.state, flush=True)
"""


@pytest.fixture
def box(machine):
    call(machine, 'answer(change(service, "deploy", stage("old"))[0].status)')
    assert enabled(machine)
    yield machine
    reset(machine)


def wait_for_step(box, step):
    """Until the running transaction has begun `step`."""
    call(
        box,
        f"""
from toolkit.release.journal import read_journal
wait_until(lambda: "{step}" in [event.step for event in read_journal(paths.transaction)], 20)
""",
    )


def outcome(box, limit=40.0):
    """Status and message of the last transaction, once it has ended."""
    return call(
        box,
        f"""
def ended():
    found = result(paths.transaction)
    return found if found is not None and found.status != "interrupted" else None
wait_until(ended, {limit})
answer([ended().status, ended().message])
""",
    )


def test_the_end_of_the_session_changes_nothing(box):
    """What a login started is killed at its end, as logind does with KillUserProcesses=yes."""
    code = PRELUDE + BEGIN + WATCH
    command = ["sudo", "-n", "env", f"PYTHONPATH={TOOL}", sys.executable, "-P", "-c", code]
    session = subprocess.Popen([*box.ssh(), "--", shlex.join(command)], stdout=subprocess.PIPE, text=True)
    try:
        assert "start_new done\n" in session.stdout, "the change was not begun"
        box.root(["systemctl", "kill", "--kill-who=all", "--signal=KILL", "ssh"])
        assert session.wait(20) != 0
    finally:
        session.kill()
        session.communicate()
        box.root(["systemctl", "restart", "ssh"])
    assert outcome(box)[0] == "committed"
    assert mark(box) == "new"
    assert enabled(box)


@pytest.mark.parametrize("way", ["reboot", "power_cut"])
def test_a_change_that_a_reboot_interrupts_is_reversed_at_boot(box, way):
    call(box, BEGIN)
    wait_for_step(box, "ready")
    assert not enabled(box), "a release that is not accepted would be started at boot"
    getattr(box, way)()
    status, message = outcome(box)
    assert status == "rolled_back"
    assert "interrupted at step ready" in message
    assert mark(box) == "old"
    assert enabled(box)


def test_an_accepted_release_serves_after_a_reboot_and_nothing_is_recovered(box):
    box.reboot()
    assert mark(box) == "old"
    said = box.journal("--boot", "--unit=ddtoolkit-recover.service")
    assert "Finished" in said
    assert "ddtoolkit recovery" not in box.journal("--boot")


def test_a_service_that_was_stopped_stays_stopped_after_a_reboot(box):
    call(box, 'answer(change(service, "stop", store.current())[0].status)')
    assert not enabled(box)
    bad = 'answer(change(service, "deploy", stage("bad", "--exit-at-once", "3"), store.current())[0].status)'
    assert call(box, bad) == "rolled_back"
    program = box.root(["systemctl", "show", "--property=ExecStart", "ddtoolkit-stub"]).stdout
    assert re.search(r"--mark old\b", program)
    box.reboot()
    assert call(box, "time.sleep(2); answer([service.mark(), manager.status().state])") == [None, "stopped"]
    call(box, 'answer(change(service, "start", store.current())[0].status)')
    assert enabled(box)


def test_an_experiment_returns_to_its_base_after_a_reboot(box):
    begun = call(
        box,
        """
outcome, _ = change(service, "experiment", stage("trial"), store.current(), experiment_seconds=15.0)
answer([outcome.status, time.time()])
""",
    )
    assert begun[0] == "committed"
    assert enabled(box)
    timed = """
from toolkit.release.experiment import read_experiment
wait_until(lambda: read_experiment(paths).timed, 10)
answer(service.mark())
"""
    assert call(box, timed) == "trial"
    box.reboot()
    assert call(box, timed) == "trial"
    end = time.monotonic() + 40
    while mark(box) != "old" and time.monotonic() < end:
        time.sleep(0.5)
    assert mark(box) == "old"
    assert outcome(box)[0] == "committed"
    assert enabled(box)


UNIT_FILE = "/etc/systemd/system/ddtoolkit-stub.service"


def test_a_refused_first_release_leaves_no_unit(box):
    reset(box)
    refused = """
outcome, _ = change(service, "deploy", stage("bad"), acceptance=REFUSES)
answer([outcome.status, manager.status().state])
"""
    assert call(box, refused) == ["first_failed", "stopped"]
    assert not box.path(UNIT_FILE).exists()
    known = box.root(["systemctl", "list-units", "--all", "--no-legend", "ddtoolkit-stub.service"])
    assert known.stdout == ""
    box.reboot()
    assert call(box, "time.sleep(1); answer(service.mark())") is None
    assert call(box, 'answer(change(service, "deploy", stage("good"))[0].status)') == "committed"
    assert enabled(box)


def test_a_first_deploy_that_a_power_cut_interrupts_leaves_no_unit(box):
    reset(box)
    call(box, BEGIN)
    wait_for_step(box, "ready")
    assert box.path(UNIT_FILE).exists()
    box.power_cut()
    assert outcome(box)[0] == "first_failed"
    assert not box.path(UNIT_FILE).exists()


def test_a_refused_release_leaves_the_base_serving_and_enabled(box):
    found = call(
        box,
        """
outcome, events = change(service, "deploy", stage("bad"), store.current(), acceptance=REFUSES)
answer([outcome.status, service.mark()])
""",
    )
    assert found == ["rolled_back", "old"]
    assert enabled(box)
