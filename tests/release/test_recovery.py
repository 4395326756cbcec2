"""A transaction is killed at every line of its journal; afterwards the old or the new release serves."""

import os
import signal
import subprocess
import sys

import pytest
from changes import change, request, steps
from stub_service import ACCEPTS, REFUSES, StubService, wait_until

from toolkit.errors import LockedError
from toolkit.release import history
from toolkit.release.controller import begin, follow, hold, result
from toolkit.release.journal import Journal, read_journal
from toolkit.release.request import Acceptance
from toolkit.release.run import work
from toolkit.service.processes import identify, read_stat


def die_at(monkeypatch, service, asked, line, *, before=False):
    """Run the transaction in a child that is killed right after writing journal line `line`, counted from 0.

    With `before` it is killed when it is about to write it, so that the effect of the step has happened.

    Returns:
        whether it was killed; False once the transaction has fewer lines.
    """
    monkeypatch.setattr("toolkit.release.controller._spawn", lambda folder, **_: None)
    folder = begin(service.layout, service.name, asked)
    monkeypatch.undo()
    child = os.fork()
    if child == 0:
        written = Journal.write

        def write(self, event, *, durable=True):
            if before and len(read_journal(folder)) == line:
                os.kill(os.getpid(), signal.SIGKILL)
            written(self, event, durable=durable)
            if len(read_journal(folder)) > line:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal.write = write
        service.host.lock.hold_transaction()
        work(folder, recover=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def recover(service):
    """What the next command does first."""
    with hold(service.layout, service.name, "next") as session:
        return session.recovered


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    stub = StubService(tmp_path_factory.mktemp("recovery") / "root")
    first = stub.stage("first")
    change(stub, "deploy", first)
    yield stub
    stub.kill()


def consistent(service, outcome, asked):
    """One release is current, serves, and is the one that is told; the history has the change once."""
    current = service.host.store.current()
    assert service.mark() == current.profile["mark"]
    assert service.host.process_status().release == current.id
    assert outcome.serving == current.id
    assert [entry.id for entry in history.read(service.paths)].count(asked.id) == 1
    assert not list(service.paths.base.glob(".current-*"))
    return current


GOOD = ["preflight", "stop_old", "switch", "start_new", "ready", "acceptance", "commit"]


@pytest.mark.parametrize("line", range(15))
def test_killed_on_the_way_to_a_good_release(stub, monkeypatch, line):
    base = stub.host.store.current()
    new = stub.stage(f"good {line}")
    asked = request("deploy", new, base, acceptance=ACCEPTS)
    assert die_at(monkeypatch, stub, asked, line)
    outcome = recover(stub)
    if line == 14:
        assert outcome is None  # the outcome was written: nothing is left to do
        outcome = result(stub.paths.transaction)
    current = consistent(stub, outcome, asked)
    if line < 2:
        assert outcome.status == "not_started"
        assert current == base
    elif line < 12:
        assert outcome.status == "rolled_back"
        assert f"interrupted at step {GOOD[line // 2]}" in outcome.message
        assert current == base
    else:
        assert outcome.status == "committed"
        assert current == new
        assert new.acceptance == {}


def test_acceptance_ends_with_the_transaction_that_it_judges_for(stub, tmp_path):
    told = tmp_path / "pids"
    waits = Acceptance(("/bin/sh", "-c", f"echo $$ $PPID > {told}; exec sleep 60", "sh"), {}, 90.0)
    base = stub.host.store.current()
    with hold(stub.layout, stub.name, "swap"):
        begin(stub.layout, stub.name, request("swap", stub.stage("judged"), base, acceptance=waits))
        wait_until(lambda: told.is_file() and told.read_text().endswith("\n"), 10)
        program, worker = (identify(int(pid)) for pid in told.read_text().split())
        runner = identify(read_stat(worker.pid).parent)
        os.kill(runner.pid, signal.SIGKILL)
        assert program.alive()
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: not (program.alive() or runner.alive() or worker.alive()))
    assert recover(stub).status == "rolled_back"


def test_a_recovery_tells_whose_change_it_ends_and_nothing_of_what_came_before(stub, monkeypatch):
    asked = request("deploy", stub.stage("told"), stub.host.store.current(), acceptance=ACCEPTS)
    assert die_at(monkeypatch, stub, asked, 8)
    told = []
    with hold(stub.layout, stub.name, "next", on_event=told.append) as session:
        assert session.recovered is not None
    assert told[0].message == f"first the interrupted deploy of {asked.who} is finished or reversed"
    assert "preflight" not in [event.step for event in told]
    assert told[-1].step == "outcome"


def test_killed_between_history_and_outcome_is_recorded_once(stub, monkeypatch):
    base = stub.host.store.current()
    new = stub.stage("late")
    asked = request("deploy", new, base, acceptance=ACCEPTS)
    assert die_at(monkeypatch, stub, asked, 14, before=True)
    assert history.read(stub.paths)[-1].id == asked.id
    outcome = recover(stub)
    assert outcome.status == "committed"
    assert consistent(stub, outcome, asked) == new


@pytest.mark.parametrize("line", [12, 14, 16, 18])
def test_killed_on_the_way_back(stub, monkeypatch, line):
    base = stub.host.store.current()
    asked = request("deploy", stub.stage("bad"), base, acceptance=REFUSES)
    assert die_at(monkeypatch, stub, asked, line)
    outcome = recover(stub)
    assert outcome.status == "rolled_back"
    assert "too slow; it was interrupted at step" in outcome.message
    assert consistent(stub, outcome, asked) == base


@pytest.mark.parametrize("line", [3, 11])
def test_killed_first_deploy_is_stopped_and_says_so(service, monkeypatch, line):
    asked = request("deploy", service.stage("one"), acceptance=ACCEPTS)
    assert die_at(monkeypatch, service, asked, line)
    outcome = recover(service)
    assert outcome.status == "first_failed"
    assert "interrupted" in outcome.message
    assert service.mark() is None
    assert service.host.store.current() is None


def test_a_restart_that_was_begun_is_finished_whatever_hands_do_meanwhile(stub, monkeypatch):
    """Refusing it then would leave the host without a server."""
    current, mark = stub.host.store.current(), stub.mark()
    assert die_at(monkeypatch, stub, request("restart", current), 3)
    assert mark is not None
    assert stub.mark() is None
    profile = current.path / "profile.json"
    made = profile.read_bytes()
    profile.chmod(0o644)
    profile.write_bytes(made.replace(b"mark", b"edit"))
    try:
        assert recover(stub).status == "committed"
        assert stub.mark() == mark
    finally:
        profile.write_bytes(made)
        profile.chmod(0o444)


@pytest.mark.parametrize(("kind", "line"), [("stop", 1), ("restart", 3)])
def test_killed_stop_and_restart_are_finished(stub, monkeypatch, kind, line):
    current = stub.host.store.current()
    asked = request(kind, current)
    assert die_at(monkeypatch, stub, asked, line)
    outcome = recover(stub) or result(stub.paths.transaction)
    assert outcome.status == "committed"
    assert (stub.mark() is None) == (kind == "stop")
    if kind == "stop":
        change(stub, "start", current)


def test_killed_worker_is_replaced_without_any_command(stub):
    """A single fault: the guard sees the end of its worker and has the journal read by another one."""
    base = stub.host.store.current()
    slow = stub.stage("slow", "--load", "60", load_timeout=30.0)
    with hold(stub.layout, stub.name, "deploy"):
        folder = begin(stub.layout, stub.name, request("deploy", slow, base))
        wait_until(lambda: "ready" in steps(read_journal(folder), "begin"))
        worker = [pid for pid in runners(folder) if parent(pid) in runners(folder)]
        os.kill(worker[0], signal.SIGKILL)
        events = list(follow(folder))
    outcome = result(folder)
    assert outcome.status == "rolled_back"
    assert "interrupted at step ready" in outcome.message
    assert "recover" in [event.step for event in events]
    assert stub.mark() == base.profile["mark"]


def test_everything_killed_and_told(stub):
    """Guard and worker both: `follow` ends, the lock is free again, the next command recovers and says so."""
    base = stub.host.store.current()
    slow = stub.stage("slow", "--load", "60", load_timeout=30.0)
    with hold(stub.layout, stub.name, "deploy"):
        folder = begin(stub.layout, stub.name, request("deploy", slow, base))
        wait_until(lambda: "ready" in steps(read_journal(folder), "begin"))
        for pid in sorted(runners(folder)):
            os.kill(pid, signal.SIGKILL)
        events = list(follow(folder))
    assert events[-1].step == "interrupted"
    assert result(folder).status == "interrupted"
    assert recover(stub).status == "rolled_back"
    assert stub.mark() == base.profile["mark"]


def test_killed_controller_changes_nothing(stub, tmp_path):
    """L9: the command that began it is killed; the next one takes its stale lock over."""
    base = stub.host.store.current()
    new = stub.stage("after", "--load", "0.5")
    script = tmp_path / "controller.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from toolkit.layout import Layout\n"
        "from toolkit.release.controller import begin, hold\n"
        "from toolkit.release.request import Request\n"
        "layout = Layout(Path(sys.argv[1]))\n"
        "with hold(layout, 'stub', 'deploy profile stub'):\n"
        "    begin(layout, 'stub', Request('deploy', 'ann@desk', release=sys.argv[2], base=sys.argv[3]))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, str(script), str(stub.layout.root), new.id, base.id]
    assert subprocess.run(command, check=False, timeout=30).returncode == -signal.SIGKILL
    with pytest.raises(LockedError, match=r"a transaction begun by .*@.* \(deploy profile stub, since .*\)"):
        recover(stub)
    for _ in follow(stub.paths.transaction):
        pass
    assert result(stub.paths.transaction).status == "committed"
    assert stub.mark() == "after"
    with hold(stub.layout, stub.name, "next") as session:
        assert session.taken_over.command == "deploy profile stub"
        assert session.recovered is None


def runners(folder):
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):  # noqa: PTH208
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"toolkit.release.run" in words and str(folder).encode() in words:
            found.append(pid)
    return found


def parent(pid):
    stat = read_stat(pid)
    return stat.parent if stat else 0
