"""A connection that breaks or falls silent: the agent does not keep its locks, the change is found again."""

import json
import subprocess
import sys
import threading
import time

import pytest
from changes import change, request
from stub_service import wait_until

from toolkit.errors import ToolkitError
from toolkit.hostside.operations import follow
from toolkit.inventory.host import Host
from toolkit.release.controller import begin, hold
from toolkit.release.journal import JOURNAL_FILE
from toolkit.release.locate import Deployed, remember
from toolkit.remote import agent

SILENT = """
import toolkit.hostside.__main__ as agent
agent.BEAT, agent.PATIENCE = 0.05, 1.0
agent.main()
"""


@pytest.fixture
def deployed(service, tmp_path, monkeypatch):
    """A service that served once; the id of that transaction."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remember(Deployed(service.name, service.layout))
    outcome, _ = change(service, "deploy", service.stage("one"))
    return service, outcome.transaction


def test_an_agent_that_hears_nothing_ends_and_one_that_does_goes_on():
    command = [sys.executable, "-c", SILENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as running:
        assert running.stdout.readline().startswith(b'{"beat"')
        for _ in range(20):
            running.stdin.write(b'{"beat": 1}\n')
            time.sleep(0.1)
        assert running.poll() is None
        assert running.wait(10) == 1


def test_a_control_machine_that_only_waits_is_heard(monkeypatch):
    class Stream:
        written = b""

        def write(self, data):
            self.written += data
            if self.written.count(b"\n") == 2:
                raise OSError("broken")  # whoever waits meets that

    monkeypatch.setattr(agent, "BEAT", 0.02)
    stream = Stream()
    before = threading.active_count()
    with agent.Agent(Host("host"), stream, "").beating():
        wait_until(lambda: stream.written.count(b"\n") > 3)
    assert set(stream.written.splitlines()) == {b'{"beat": 1}'}
    assert threading.active_count() == before


def test_a_change_that_was_begun_is_found_again(deployed):
    service, done = deployed
    sent = []
    found = follow({"service": service.name, "last": None, "after": None}, sent.append)
    assert found["outcome"]["transaction"] == done
    assert sent


def test_what_was_heard_is_not_told_again_whatever_the_clock_says(deployed):
    """The host's clock was set back an hour in the middle of the change."""
    service, _ = deployed
    journal = service.paths.transaction / JOURNAL_FILE
    lines = [json.loads(line) for line in journal.read_bytes().partition(b"\0")[0].splitlines()]
    for event in lines[3:]:
        event["time"] -= 3600
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in lines))
    sent = []
    follow({"service": service.name, "last": lines[2]}, sent.append)
    assert [message["event"] for message in sent] == lines[3:]
    follow({"service": service.name, "last": {**lines[2], "step": "of another"}}, sent.append)
    assert [message["event"] for message in sent[len(lines[3:]) :]] == lines


def test_a_change_that_was_never_begun_is_not_taken_for_the_one_before(deployed):
    service, done = deployed
    with pytest.raises(ToolkitError, match="before the change was begun; what serves was not touched"):
        follow({"service": service.name, "last": None, "after": done}, lambda _: None)


def test_a_first_deploy_that_left_no_record_was_not_begun(deployed):
    with pytest.raises(ToolkitError, match="before the change was begun"):
        follow({"service": "other", "last": None, "after": None}, lambda _: None)


def test_a_change_that_is_still_being_prepared_is_waited_for(deployed):
    service, done = deployed
    second = service.stage("two")
    found = []
    args = {"service": service.name, "last": None, "after": done}
    waiting = threading.Thread(target=lambda: found.append(follow(args, lambda _: None)))
    with hold(service.layout, service.name, "the lost one"):
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
        begin(service.layout, service.name, request("deploy", second, service.host.store.current()))
        waiting.join(20)
    assert found[0]["outcome"]["release"] == second.id


def test_who_reserves_is_told_of_the_change_before(deployed):
    service, done = deployed
    asked = {"service": service.name, "who": "ann", "command": "c", "lock_wait": 0}
    code = f"from toolkit.hostside.operations import reserve; print(reserve({asked!r}, print)['transaction'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == done
