"""Who holds the lock, how it is taken over, and what nobody can take away."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from changes import request
from stub_service import wait_until

from toolkit.errors import ConfigError, LockedError
from toolkit.release import lock as lock_module
from toolkit.release.controller import begin, follow, hold
from toolkit.release.journal import read_journal
from toolkit.release.lock import Lock
from toolkit.release.request import Acceptance

SLOW = Acceptance(("/bin/sh", "-c", 'sleep 2; echo "{}" > "$4"', "sh"), {}, 10.0)


@pytest.fixture
def lock(service):
    return service.host.lock


def another_process(service, command="deploy profile stub"):
    """A process that holds the lock until its input is closed."""
    code = (
        "import sys; from pathlib import Path; from toolkit.layout import Layout;"
        "from toolkit.release.host import ServiceHost\n"
        f"with ServiceHost(Layout(Path({str(service.layout.root)!r})), 'stub').lock.hold({command!r}):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_says_who_since_when_and_how_to_release(service, lock, monkeypatch):
    with another_process(service) as other:
        holder = lock.holder()
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda: holder.since + 0.4)
            with pytest.raises(LockedError) as caught, lock.hold("swap"):
                pass
        assert caught.value.exit_code == 3
        assert f"pid {other.pid}" in caught.value.message
        assert re.search(r" since \S+ \S+Z \(0 s\): deploy profile stub", caught.value.message)
        assert f"ddtoolkit lock release {holder.token} --service stub" in caught.value.hint
        assert service.paths.lock.stat().st_mode & 0o777 == 0o600
        other.stdin.close()
    assert lock.holder() is None
    with lock.hold("swap") as held:
        assert held.taken_over is None


def test_wait_gets_it_when_it_is_freed(service, lock):
    with another_process(service) as other:
        threading.Timer(0.3, other.stdin.close).start()
        with lock.hold("swap", wait=20) as held:
            assert held.taken_over is None
            assert lock.holder() == held.info


def test_who_is_waited_for_is_told_at_once_at_a_change_and_now_and_then(service, lock, monkeypatch):
    said = []

    def told(count):
        end = time.monotonic() + 10
        while len(said) < count:
            assert time.monotonic() < end, said
            time.sleep(0.02)

    def wait():
        with lock.hold("swap", wait=30, on_wait=said.append):
            said.append("got it")

    with another_process(service, "deploy profile stub") as other:
        waiting = threading.Thread(target=wait)
        waiting.start()
        told(1)
        value = json.loads(service.paths.lock.read_text()) | {"command": "rollback"}
        service.paths.lock.write_text(json.dumps(value))
        told(2)
        monkeypatch.setattr(lock_module, "_TELL_EVERY", 0.3)
        told(4)
        other.stdin.close()
    waiting.join(10)
    since = rf"stub is locked by \S+ pid {other.pid} since \S+ \S+Z \(\d+ s\): "
    assert re.fullmatch(rf"{since}deploy profile stub; waiting for it, 30 s at most", said[0]), said
    assert all(re.fullmatch(rf"{since}rollback; waiting for it, \d+ s at most", line) for line in said[1:-1])
    assert said[-1] == "got it"


def test_dead_holder_is_taken_over_visibly(service, lock):
    with another_process(service) as other:
        other.kill()
        other.wait()
        other.stdin.close()
        assert lock.stale(lock.holder())
        with lock.hold("swap") as held:
            assert held.taken_over.command == "deploy profile stub"
            assert held.info.command == "swap"


def test_holder_elsewhere_lives_by_its_heartbeat(lock, service, monkeypatch):
    with lock.hold("swap"):
        value = json.loads(service.paths.lock.read_text()) | {"host": "elsewhere", "process": None}
        service.paths.lock.write_text(json.dumps(value))
        assert not lock.stale(lock.holder())
        old = time.time() - lock_module.STALE_AFTER - 1
        os.utime(service.paths.lock, (old, old))
        assert lock.stale(lock.holder())


def test_heartbeat_is_kept_up(lock, service, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT", 0.05)
    with lock.hold("swap"):
        os.utime(service.paths.lock, (1, 1))
        wait_until(lambda: time.time() - service.paths.lock.stat().st_mtime < 5)


def test_release_needs_the_token(lock):
    with lock.hold("deploy") as held:
        with pytest.raises(ConfigError, match="another token") as caught:
            lock.release("0000")
        assert caught.value.hint == "ddtoolkit lock show stub"
        assert lock.release(held.info.token) == held.info
        assert lock.holder() is None
        with lock.hold("swap") as other:
            pass
        assert other.info.token != held.info.token
    with pytest.raises(ConfigError, match="not locked"):
        lock.release("0000")


def test_releasing_ones_own_lock_leaves_a_successors_alone(lock):
    with lock.hold("deploy") as held:
        lock.release(held.info.token)
        successor = lock.hold("swap")
        successor.__enter__()
    assert lock.holder().command == "swap"
    successor.__exit__(None, None, None)


def test_running_transaction_is_never_ended(service, lock):
    with lock.hold("deploy") as held:
        descriptor = lock.hold_transaction()
        assert Lock(service.paths, "stub").hold_transaction() is None
        with pytest.raises(LockedError, match="transaction is running"):
            lock.release(held.info.token)
    with (
        pytest.raises(LockedError, match="transaction is running on the host and ends by itself"),
        lock.hold("x"),
    ):
        pass
    os.close(descriptor)
    with lock.hold("x"):
        assert not lock.transaction_running()


def test_a_transaction_whose_command_was_interrupted_is_told_with_whose_it_is(service, lock):
    said = []
    asked = request("swap", service.stage("one"), command="swap --set a.b=1", acceptance=SLOW)
    with hold(service.layout, service.name, "swap --set a.b=1"):
        folder = begin(service.layout, service.name, asked)
    began = read_journal(folder)
    with pytest.raises(LockedError) as caught, lock.hold("x", wait=0.5, on_wait=said.append):
        pass
    assert began
    words = (
        r"stub: a swap of ann@desk, whose command is gone, is running on the host "
        r"since \d{4}-\d\d-\d\d [\d:]{8}Z \(\d s\) and ends by itself: swap --set a\.b=1"
    )
    assert re.fullmatch(words, caught.value.message)
    assert re.fullmatch(f"{words}; waiting for it, 1 s at most", said[0])
    assert list(follow(folder))[-1].step == "outcome"


def test_damaged_token_locks_nobody_out(service, lock):
    service.paths.lock.write_text('{"token": ')
    with lock.hold("swap") as held:
        assert lock.holder() == held.info


def test_look_and_replacement_are_serialised(service, lock):
    """Two takers of one stale token: the second waits for the first, and then sees its token."""
    with lock.hold("first"):
        pass
    got = threading.Event()

    def take():
        with lock.hold("second"):
            got.set()

    with (service.paths.state / "lock.guard").open() as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        taker = threading.Thread(target=take)
        taker.start()
        assert not got.wait(0.3)
    assert got.wait(5)
    taker.join()


def test_only_one_of_many_gets_it(lock):
    got, barrier = [], threading.Barrier(8)

    def contend():
        barrier.wait()
        try:
            with lock.hold("x"):
                wait_until(lambda: len(got) == 7)
                got.append(True)
        except LockedError:
            got.append(False)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]
