"""A disk without a free byte: nothing half-written, and the old release serves or serves again."""

import contextlib
import os
import subprocess

import pytest
from changes import change, request
from stub_service import REFUSES, StubService

from toolkit.errors import ToolkitError
from toolkit.release import control, history
from toolkit.release.controller import begin, hold, result

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small file system")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A service on a file system of 2 MiB that serves `one`."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False)
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


def run_prepared(stub, asked, monkeypatch):
    """A transaction that was prepared while there was space, and finds none when it runs."""
    from toolkit.release import controller

    spawn = controller._spawn
    with hold(stub.layout, stub.name, "test"):
        with monkeypatch.context() as patch:
            patch.setattr(controller, "_spawn", lambda folder, *, recover: None)
            folder = begin(stub.layout, stub.name, asked)
        with no_space(stub):
            spawn(folder, recover=False)
            for _ in controller.follow(folder):
                pass
    return result(folder)


def test_rollback_needs_no_space(full, monkeypatch):
    stub, first = full
    second = stub.stage("two", "--chatter", "5000")
    outcome = run_prepared(stub, request("deploy", second, first, acceptance=REFUSES), monkeypatch)
    assert outcome.status == "rolled_back"
    assert stub.mark() == "one"
    assert stub.host.store.current() == first


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
