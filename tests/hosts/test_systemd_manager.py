"""Services under a real systemd, oldest and newest that is supported: start, stop, status, logs, sandbox."""

import re
import sys

import pytest

from tests.hosts.stub_on_host import USER, call, enabled, mark, reset

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def box(machine):
    yield machine
    reset(machine)


def reloads(box):
    return len(re.findall(r"^Reloading\.+$", box.journal("_PID=1"), re.MULTILINE))


def test_start_stop_and_enable(box):
    started = call(
        box,
        """
manager.start(stage("one").path)
service.wait_for_mark("one")
status = manager.status()
answer({"status": status.to_json(), "release": store.all()[0].id})
""",
    )
    status = started["status"]
    assert (status["state"], status["release"], status["restarts"]) == ("running", started["release"], 0)
    assert status["differences"] == []
    assert status["pid"] == int(box.root(["systemctl", "show", "-P", "MainPID", "ddtoolkit-stub"]).stdout)
    unit = box.root(["stat", "-c", "%U %G %a", "/etc/systemd/system/ddtoolkit-stub.service"]).stdout
    assert unit.strip() == "root root 644"
    assert not enabled(box)
    call(box, "manager.enable(); manager.enable()")
    assert enabled(box)
    stopped = call(
        box,
        """
import time
begin = time.time()
report, status = manager.stop(), manager.status()
manager.disable()
time.sleep(1.5)
forgotten = manager.status()  # by systemd, which keeps no unit that is neither active nor enabled
answer({"clean": report.clean, "words": report.describe(), "seconds": report.seconds,
        "state": status.state, "asked": status.asked_to_stop,
        "since": [status.since - begin, forgotten.since - begin]})
""",
    )
    assert (stopped["clean"], stopped["state"], stopped["asked"]) == (True, "stopped", True), stopped
    assert stopped["seconds"] < 5
    assert all(0 <= since < stopped["seconds"] + 1 for since in stopped["since"]), stopped
    assert not enabled(box)
    assert call(box, "answer(service.mark())") is None


def test_systemd_is_told_to_reload_only_when_a_unit_changed(box):
    """L10."""
    call(box, 'manager.start(stage("one").path); manager.stop()')
    before = reloads(box)
    call(box, "manager.start(store.all()[0].path); manager.enable(); manager.stop(); manager.disable()")
    assert reloads(box) == before
    call(box, 'manager.start(stage("two").path)')
    assert reloads(box) == before + 1


def test_a_rendered_unit_has_no_warning_and_any_other_is_refused(box):
    """R4, R5: this systemd's own word; what it says about another unit does not count."""
    said = call(
        box,
        """
from toolkit.service.systemctl import systemd_version
from toolkit.service.systemd import render_unit, verify_unit
Path("/etc/systemd/system/network-online.target.d").mkdir()
Path("/etc/systemd/system/network-online.target.d/x.conf").write_text("[Unit]\\nNoSuchKey=1\\n")
text = render_unit(stage("one").unit, systemd_version())
answer([
    systemd_version(),
    verify_unit(text, "stub"),
    verify_unit(text.replace("[Service]", "[Service]\\nStartLimitBurst=3\\nNoSuchKey=1"), "stub"),
    verify_unit(text.replace("[Unit]", "[Unit]\\nRestartSteps=3"), "stub"),
])
""",
    )
    assert said[0] in (252, 257)
    assert said[1] == []
    assert any("NoSuchKey" in line for line in said[2])
    assert any("RestartSteps" in line for line in said[3])


def test_a_long_load_is_not_killed_by_the_default_of_systemd(box):
    """L1, with a default of 1 s in place of 90 s."""
    settings = "[Manager]\nDefaultTimeoutStartSec=1s\nDefaultTimeoutStopSec=1s\n"
    file = box.path("/etc/systemd/system.conf.d/default.conf")
    file.parent.mkdir()
    file.write_text(settings)
    box.root(["systemctl", "daemon-reexec"])
    try:
        found = call(
            box,
            """
manager.start(stage("slow", "--load", "4").path)
service.wait_for_mark("slow", 10)
status = manager.status()
answer([status.state, status.restarts])
""",
        )
        shown = box.root(["systemctl", "show", "-P", "TimeoutStartUSec", "ddtoolkit-stub"]).stdout
    finally:
        file.unlink()
        file.parent.rmdir()
        box.root(["systemctl", "daemon-reexec"])
    assert found == ["running", 0]
    assert shown.strip() == "10s"


def test_a_grandchild_that_outlives_the_server_is_named(box):
    """L4."""
    found = call(
        box,
        """
manager.start(stage("one", "--grandchild", "session").path)
service.wait_for_mark("one")
line = next(line for line in manager.log_tail(50) if line.startswith("grandchild"))
report = manager.stop()
pid = int(line.split()[1])
answer([pid, [item.pid for item in report.killed], report.clean, report.describe(),
        Path(f"/proc/{pid}").exists()])
""",
    )
    pid, killed, clean, words, there = found
    assert (killed, clean, there) == ([pid], True, False)
    assert f"killed what outlived the server: {pid} (sleep)" in words


def test_a_stop_that_never_ends_is_left_in_bounded_time(box):
    """L5: an administrator's drop-in lets systemd wait for ever; what still runs is named."""
    found = call(
        box,
        """
from toolkit.service.unit_files import FOLDER
drop_in = FOLDER / "ddtoolkit-stub.service.d" / "wait.conf"
drop_in.parent.mkdir(parents=True)
drop_in.write_text("[Service]\\nTimeoutStopSec=infinity\\n")
manager.start(stage("one", "--ignore-term").path)
service.wait_for_mark("one")
before = manager.status()
report = manager.stop()
after = manager.status()
answer([before.pid, report.seconds, report.clean, report.describe(), before.differences,
        after.state, after.message])
""",
    )
    pid, seconds, clean, words, differences, state, message = found
    assert seconds < 12
    assert not clean
    assert f"still running and not to be killed: {pid} (python" in words
    assert f"port 30000 on 127.0.0.1 is in use by process {pid}" in words
    assert differences == ["/etc/systemd/system/ddtoolkit-stub.service.d/wait.conf changes the unit"]
    assert (state, message) == ("failed", words)


def test_a_server_that_ends_at_once_fails_the_deploy_in_seconds_with_its_last_words(box):
    """L8."""
    found = call(
        box,
        """
begun = time.monotonic()
policy = RestartPolicy(delay=1.0, burst=3, interval=300.0)
release = stage("bad", "--exit-at-once", "3", load_timeout=60.0, restart=policy)
outcome, _ = change(service, "deploy", release)
answer([outcome.status, outcome.message, list(outcome.log), time.monotonic() - begun])
""",
    )
    status, message, log, took = found
    assert status == "first_failed"
    assert "the server ended with status 3" in message
    assert any("cannot load the model: bad" in line for line in log)
    assert took < 10
    assert not enabled(box)
    state = box.root(["systemctl", "show", "-P", "ActiveState", "ddtoolkit-stub"]).stdout.strip()
    assert state in ("inactive", "failed")


def test_a_program_that_cannot_be_executed_is_refused_before_anything_stops(box):
    found = call(
        box,
        """
first, second = stage("one"), stage("two", argv=("/opt/none/python", "-m", "x"))
change(service, "deploy", first)
outcome, _ = change(service, "deploy", second, first)
answer([outcome.status, outcome.message, service.mark()])
""",
    )
    assert found[0] == "not_started"
    assert "/opt/none/python" in found[1]
    assert found[2] == "one"


def test_restarts_end_at_the_limit_and_a_start_begins_anew(box):
    found = call(
        box,
        """
release = stage("one", "--exit-after", "0.8", restart=RestartPolicy(delay=0.1, burst=3, interval=30.0))
states = []
for _ in range(2):
    manager.start(release.path)
    seen = set()
    wait_until(lambda: seen.add(manager.status().state) or "failed" in seen, 15)
    states.append(sorted(seen))
status = manager.status()
answer([states, status.restarts, status.exit_status, status.message])
""",
    )
    states, restarts, exit_status, message = found
    assert all({"failed", "running"} <= set(seen) for seen in states)
    assert (restarts, exit_status) == (3, 9) or (restarts, exit_status) == (2, 9)
    assert "the server ended with status 9" in message
    assert "not started again" in message


def test_last_words_after_a_flood_are_kept(box):
    """L12: journald drops what comes faster than 10,000 messages in 30 s, but not of this unit."""
    text = "import sys\nfor i in range(30000): print(i)\nsys.exit('the last words')\n"
    box.path("/opt/stub/flood.py").write_text(text)
    found = call(
        box,
        """
argv = (sys.executable, "-S", "-u", "/opt/stub/flood.py")
manager.start(stage("one", argv=argv, restart=RestartPolicy(burst=0)).path)
wait_until(lambda: manager.status().state == "failed", 60)
answer(manager.log_tail(20))
""",
    )
    assert any("the last words" in line for line in found)
    assert any(line == "29999" for line in found)


def test_secrets_reach_the_server_and_nobody_else(box):
    secret = 's3cr%t-$HOME-"quoted"'
    found = call(
        box,
        """
secret = sys.argv[1]
Path("/root/key").write_text(secret)
os.chmod("/root/key", 0o600)
file = paths.state / "secrets" / "key.yaml"
release_id = store.new_id("0" * 64)
file = paths.state / "secrets" / f"{release_id}.yaml"
unit = service.unit(release_id, "--mark", "one", "--config", str(file), manager="systemd", user="ddtoolkit",
                    secrets={"api-key": SecretSource(file="/root/key")}, secrets_file=str(file))
release = store.stage(release_id, profile={}, unit=unit, manifest={})
outcome, _ = change(service, "deploy", release)
import urllib.request
def ask(headers):
    request = urllib.request.Request(f"http://127.0.0.1:{service.port}/generate", b"{}", headers)
    try:
        return urllib.request.urlopen(request, timeout=5).status
    except OSError as error:
        return getattr(error, "code", str(error))
pid = manager.status().pid
answer([outcome.status, ask({}), ask({"Authorization": "Bearer " + secret}), oct(file.stat().st_mode)[-3:],
        Path(f"/proc/{pid}/environ").read_text(), outcome.message])
""",
        secret,
    )
    assert found[:4] == ["committed", 401, 200, "600"], found
    places = {
        "environment": found[4],
        "ps": box.root(["ps", "-eo", "args"]).stdout,
        "unit": box.root(["systemctl", "cat", "ddtoolkit-stub"]).stdout,
        "show": box.root(["systemctl", "show", "ddtoolkit-stub"]).stdout,
        "journal": box.journal(),
        "release": box.root(["sh", "-c", "cat /opt/ddtoolkit/services/stub/releases/*/*.json"]).stdout,
        "history": box.root(["cat", "/var/lib/ddtoolkit/state/stub/history.jsonl"]).stdout,
    }
    assert [place for place, text in places.items() if "s3cr" in text] == []


INSIDE = """
import json, os, pathlib, sys
def writable(path):
    try:
        pathlib.Path(path, "probe").write_text("x")
    except OSError:
        return False
    return True
def readable(path):
    try:
        os.listdir(path)
    except OSError:
        return False
    return True
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
home = os.environ.get("HOME", "")
seen = {
    "user": os.getuid(),
    "no new privileges": status["NoNewPrivs"].strip(),
    "writable": [path for path in ("/", "/opt/ddtoolkit", "/opt/ddtoolkit/services/stub", "/etc", "/usr",
                 "/var/lib/ddtoolkit", "/var/cache/ddtoolkit", os.getcwd(), "/tmp") if writable(path)],
    "read-only": [path for path in ("/usr", "/etc", "/opt", "/var/lib", os.getcwd())
                  if os.statvfs(path).f_flag & os.ST_RDONLY],
    "state": readable("/var/lib/ddtoolkit/state/stub"),
    "release": readable("/opt/ddtoolkit/services/stub/releases"),
    "homes": [path for path in ("/home/deploy",) if writable(path)],
    "tunables": os.access("/proc/sys/kernel/domainname", os.W_OK),
    "cwd": os.getcwd(),
}
print("seen " + json.dumps(seen), flush=True)
import time; time.sleep(60)
"""


def test_the_sandbox_as_it_is_seen_from_inside(box):
    """H2 and the hardening."""
    box.path("/opt/stub/inside.py").write_text(INSIDE)
    seen = call(
        box,
        """
manager.start(stage("one", argv=(sys.executable, "-S", "/opt/stub/inside.py"),
              limits={"memlock": None}, environment={"HOME": str(paths.cache)}).path)
def line():
    return next((line for line in manager.log_tail(50) if line.startswith("seen ")), None)
wait_until(line, 10)
answer(json.loads(line()[5:]))
""",
    )
    uid = int(box.root(["id", "-u", USER]).stdout)
    assert seen == {
        "user": uid,
        "no new privileges": "1",
        "writable": ["/var/cache/ddtoolkit/stub", "/tmp"],
        "read-only": ["/usr", "/etc", "/opt", "/var/lib"],
        "state": False,
        "release": True,
        "homes": [],
        "tunables": False,
        "cwd": "/var/cache/ddtoolkit/stub",
    }
    # A container may not raise this limit, so only the asking can be seen here.
    assert (
        box.root(["systemctl", "show", "-P", "LimitMEMLOCK", "ddtoolkit-stub"]).stdout.strip() == "infinity"
    )
    probe = box.root(["sh", "-c", "ls /tmp/probe"], check=False)
    if not sys.executable.startswith("/tmp/"):  # else hiding /tmp would hide the interpreter
        assert probe.returncode != 0, "the service's /tmp is the host's"


def test_what_was_changed_by_hand_is_told(box):
    found = call(
        box,
        """
import subprocess
manager.start(stage("one").path)
service.wait_for_mark("one")
file = Path("/etc/systemd/system/ddtoolkit-stub.service")
def told():
    return list(manager.status().differences)
subprocess.run(["systemctl", "restart", "ddtoolkit-stub"], check=True)
by_hand = told()
time.sleep(2)
file.write_text(file.read_text().replace("TasksMax=infinity", "TasksMax=4711"))
edited = told()
subprocess.run(["systemctl", "daemon-reload"], check=True)
answer([by_hand, edited, told()])
""",
    )
    by_hand, edited, reloaded = found
    other = "it was started again by other means (systemctl?) than this tool"
    path = "/etc/systemd/system/ddtoolkit-stub.service"
    changed = f"the unit file {path} is not the one that was installed"
    older = f"the process is older than its unit file {path}"
    unread = "systemd has not read the unit files that are on disk (systemctl daemon-reload)"
    assert by_hand == [other]
    assert edited == [changed, unread, older, other]
    assert reloaded == [changed, older, other]
    assert mark(box) == "one"


def test_enabling_is_no_change_by_hand_and_an_unread_drop_in_is(box):
    before, after = call(
        box,
        """
manager.start(stage("one").path)
manager.enable()
before = list(manager.status().differences)
folder = Path("/etc/systemd/system/ddtoolkit-stub.service.d")
folder.mkdir()
(folder / "n.conf").write_text("[Service]\\nNice=5\\n")
answer([before, list(manager.status().differences)])
""",
    )
    assert before == []
    assert after == [
        "/etc/systemd/system/ddtoolkit-stub.service.d/n.conf changes the unit",
        "systemd has not read the unit files that are on disk (systemctl daemon-reload)",
    ]
