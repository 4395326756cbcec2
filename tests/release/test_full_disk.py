"""A disk without a free byte: nothing half-written, and the old release serves or serves again."""

import contextlib
import errno
import os
import shutil
import subprocess

import pytest
from changes import change, request
from stub_service import ACCEPTS, REFUSES, StubService

from toolkit.errors import ToolkitError
from toolkit.release import control, history
from toolkit.release.controller import begin, hold, result
from toolkit.release.journal import Journal, read_journal
from toolkit.release.request import Comparison, Launch
from toolkit.release.run import work

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small file system")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A service on a file system of 8 MiB and 2,000 inodes that serves `one`."""
    folder = tmp_path_factory.mktemp("disk")
    options = "size=8m,nr_inodes=2000"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip(reason="no file system can be mounted here")
    stub = StubService(folder / "root")
    first = stub.stage("one")
    change(stub, "deploy", first)
    yield stub, first
    stub.kill()
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def no_space(stub):
    filler = stub.layout.root / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_inode(stub):
    folder = stub.layout.root / "many"
    folder.mkdir()
    with contextlib.suppress(OSError):
        for number in range(2000):
            (folder / str(number)).touch()
    try:
        yield
    finally:
        shutil.rmtree(folder)


def files(stub):
    return {path for path in stub.layout.root.rglob("*") if path.name != "filler"}


def test_staging_leaves_nothing(full):
    stub, _ = full
    before = files(stub)
    with no_space(stub), pytest.raises(ToolkitError, match="cannot write the release: No space left"):
        stub.stage("two")
    assert files(stub) == before
    assert stub.mark() == "one"


def test_preparing_changes_nothing(full):
    stub, first = full
    second = stub.stage("two")
    pid = stub.host.process_status().pid
    with hold(stub.layout, stub.name, "deploy"), no_space(stub):
        with pytest.raises(ToolkitError, match="No space left"):
            begin(stub.layout, stub.name, request("deploy", second, first))
        assert not stub.paths.transaction.with_name("transaction.new").exists()
    assert stub.host.process_status().pid == pid


def test_lock_says_so(full):
    stub, _ = full
    for kept in stub.paths.state.glob("reserve.*"):
        kept.unlink()
    refused = pytest.raises(ToolkitError, match="cannot take the lock: No space left")
    with no_space(stub), refused, hold(stub.layout, stub.name, "deploy"):
        pass


def run_prepared(stub, asked, monkeypatch, full_of=no_space):
    """A transaction that was prepared while there was space, and finds none when it runs."""
    from toolkit.release import controller

    spawn = controller._spawn
    with hold(stub.layout, stub.name, "test"):
        with monkeypatch.context() as patch:
            patch.setattr(controller, "_spawn", lambda folder, *, recover: None)
            folder = begin(stub.layout, stub.name, asked)
        with full_of(stub):
            spawn(folder, recover=False)
            for _ in controller.follow(folder):
                pass
    return result(folder)


@pytest.mark.parametrize(
    ("kind", "full_of", "said"),
    [
        ("deploy", no_space, "0.0 MiB free"),
        ("swap", no_inode, "(inodes)"),
        ("rollback", no_inode, "(inodes)"),
        ("experiment", no_space, "0.0 MiB free"),
    ],
)
def test_a_change_that_could_not_be_written_is_refused_before_the_stop(
    full, monkeypatch, kind, full_of, said
):
    """H9: with a large model, finding out after the stop costs many minutes without a server."""
    stub, first = full
    second = stub.stage("two")
    pid = stub.host.process_status().pid
    asked = request(kind, second, first, acceptance=ACCEPTS, experiment_seconds=60.0)
    outcome = run_prepared(stub, asked, monkeypatch, full_of)
    shutil.rmtree(second.path)
    assert (outcome.status, outcome.serving) == ("not_started", first.id), outcome.message
    assert said in outcome.message
    assert f"the acceptance report ({second.path})" in outcome.message
    assert outcome.message.endswith("nothing was changed")
    assert "free some there" in outcome.hint
    assert "stop_old" not in [event.step for event in read_journal(stub.paths.transaction)]
    assert stub.host.process_status().pid == pid


def test_a_test_that_restarts_is_refused_before_the_stop(full, monkeypatch):
    stub, first = full
    pid = stub.host.process_status().pid
    launch = Launch("chain", stub.unit(first.id).to_json(), ACCEPTS)
    asked = request("test", first, acceptance=ACCEPTS, comparison=Comparison((launch,), ACCEPTS))
    outcome = run_prepared(stub, asked, monkeypatch)
    assert (outcome.status, stub.host.process_status().pid) == ("failed", pid)
    assert "0.0 MiB free" in outcome.message


def test_rollback_needs_no_space(full):
    """The new release fills the disk up; the way back takes nothing."""
    stub, first = full
    filler = stub.layout.root / "filler"
    fills = f'cat /dev/zero > {filler}; exec "$@"'
    serve = stub.unit("x", "--mark", "two", "--chatter", "5000").argv
    second = stub.stage("two", argv=("/bin/sh", "-c", fills, "sh", *serve))
    outcome, _ = change(stub, "deploy", second, first, acceptance=REFUSES)
    left = shutil.disk_usage(filler).free
    filler.unlink()
    assert left < 64 << 10
    assert outcome.status == "rolled_back", outcome.message
    assert stub.mark() == "one"
    assert stub.host.store.current() == first


@pytest.mark.parametrize("line", [1, 2, 3, 5, 8, 11, 13])
def test_a_journal_that_cannot_be_written_any_more_leaves_a_server(full, monkeypatch, line):
    """From some line on: before the stop it is not stopped, after it the old or the new release serves."""
    stub, _ = full
    base = stub.host.store.current()
    pid = stub.host.process_status().pid
    asked = request("swap", stub.stage(f"line {line}"), base, acceptance=ACCEPTS)
    monkeypatch.setattr("toolkit.release.controller._spawn", lambda folder, *, recover: None)
    with hold(stub.layout, stub.name, "test"):
        folder = begin(stub.layout, stub.name, asked)
        monkeypatch.undo()
        written = Journal.write

        def write(self, event, *, durable=True):
            if len(read_journal(folder)) >= line:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            written(self, event, durable=durable)

        child = os.fork()
        if child == 0:
            Journal.write = write
            stub.host.lock.hold_transaction()
            work(folder, recover=False)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    if line <= 2:  # "stop_old" could not be announced
        assert stub.host.process_status().pid == pid
    current = stub.host.store.current()
    assert stub.mark() == current.profile["mark"]
    with hold(stub.layout, stub.name, "next") as session:
        assert session.recovered.status in ("not_started", "rolled_back", "committed")
    current = stub.host.store.current()
    assert stub.mark() == current.profile["mark"]
    if current != base:
        assert change(stub, "rollback", base, current)[0].status == "committed"


def test_stop_and_start_need_no_space(full, monkeypatch):
    stub, first = full
    assert run_prepared(stub, request("stop"), monkeypatch).status == "committed"
    assert stub.mark() is None
    assert run_prepared(stub, request("start", first), monkeypatch).status == "committed"
    assert stub.mark() == "one"


def test_commands_that_stop_and_start_work_and_say_so(full):
    stub, _ = full
    reserved = {path.name: path.stat().st_size for path in stub.paths.state.glob("reserve.*")}
    assert len(reserved) == 3
    before = len(history.read(stub.paths))
    for verb, mark in ((control.stop, None), (control.start, "one"), (control.restart, "one")):
        with no_space(stub):
            outcome = verb(stub.layout, stub.name)
            assert outcome.status == "committed", outcome.message
            assert outcome.message.endswith(f"; the disk under {stub.paths.state} is full")
            assert "free some space" in outcome.hint
            assert stub.mark() == mark
            assert stub.host.lock.holder() is None
        with hold(stub.layout, stub.name, "look"):
            pass
        assert {path.name: path.stat().st_size for path in stub.paths.state.glob("reserve.*")} == reserved
    kinds = [(entry.kind, entry.outcome) for entry in history.read(stub.paths)[before:]]
    assert kinds == [("stop", "committed"), ("start", "committed"), ("restart", "committed")]
    outcome = control.restart(stub.layout, stub.name)
    assert (outcome.message, outcome.hint) == ("restarted", None)


def test_history_has_space_of_its_own(full):
    stub, _ = full
    stub.host.reserve.fill()
    before = len(history.read(stub.paths))
    with no_space(stub):
        for number in range(20):
            history.append(stub.paths, history.Entry(f"{number}", "test", "failed", "ann@desk", "x" * 200))
    assert len(history.read(stub.paths)) == before + 20


def test_log_on_a_full_disk_never_stops_serving(full):
    stub, _ = full
    third = stub.stage("chatty", "--chatter", "50000", log_max_size=1 << 20)
    change(stub, "deploy", third, stub.host.store.current())
    with no_space(stub):
        assert [stub.mark() for _ in range(5)] == ["chatty"] * 5
    assert stub.mark() == "chatty"
    stub.wait_for_mark("chatty")
    assert "bytes of output were lost" in stub.paths.log.read_text()
    assert stub.host.process_status().restarts == 0
