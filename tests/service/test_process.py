"""The process manager and its supervisor, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stub_service import HERE, wait_until

from toolkit.errors import ToolkitError
from toolkit.files import Record
from toolkit.layout import Layout
from toolkit.service.process import ProcessManager
from toolkit.service.processes import ProcessId, identify, read_stat
from toolkit.service.supervision import STATUS_FILE, read_supervision
from toolkit.service.unit import RestartPolicy


@pytest.fixture
def manager(service):
    return ProcessManager(service.paths)


def record(service):
    return read_supervision(service.paths.supervisor)


def test_runs_detached_and_stops(service, manager):
    release = service.stage("one")
    manager.start(release.path)
    status = manager.status()
    assert (status.state, status.release, status.supervised) == ("running", release.id, True)
    supervisor = record(service).supervisor.pid
    assert os.getsid(supervisor) != os.getsid(0)
    assert read_stat(status.pid).parent == supervisor
    assert read_stat(supervisor).parent != os.getpid()
    service.wait_for_mark("one")
    report = manager.stop()
    assert report.clean
    assert report.killed == ()
    status = manager.status()
    assert (status.state, status.exit_signal, status.asked_to_stop) == ("stopped", "SIGTERM", True)
    assert service.mark() is None


def test_argv_and_environment_arrive_byte_for_byte(service, manager, tmp_path):
    """R1, R2 for the process manager."""
    words = [
        "--tmpl",
        "http://h/%s",
        "pa$1wor$D",
        '{"a": "b c"}',
        "",
        "a;b # *",
        "\t'\\\"",
        "\u00e9\u2028",
        "$$",
    ]
    values = {"A": "100%FREE ${HOME} $X", "U": "u?options=-c search_path=app", "E": ""}
    program = tmp_path / "show.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "data = pathlib.Path('/proc/self/cmdline').read_bytes()\n"
        "data += b'\\0'.join(os.environb[name.encode()] for name in 'AUE')\n"
        "pathlib.Path(sys.argv[1]).write_bytes(data)\n"
    )
    argv = (sys.executable, "-S", str(program), str(tmp_path / "seen"), *words)
    manager.start(service.stage("one", argv=argv, environment=values).path)
    wait_until(lambda: manager.status().state == "stopped")
    seen = (tmp_path / "seen").read_bytes().decode()
    assert seen == "\0".join([*argv, *values.values()])


def test_caller_environment_stays_out(service, manager, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    release = service.stage("one", environment={"A": "b"})
    manager.start(release.path)
    data = Path(f"/proc/{manager.status().pid}/environ").read_bytes()
    names = {item.partition(b"=")[0].decode() for item in data.split(b"\0") if item}
    assert names == {"PATH", "LANG", "A", "INVOCATION_ID"}


def test_survives_its_caller_and_terminal(service):
    release = service.stage("one")
    line = f"{sys.executable} {HERE}/start_and_stop.py {service.layout.root} {release.path} --and-die"
    command = ["script", "-qec", line, "/dev/null"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    service.wait_for_mark("one")
    assert ProcessManager(service.paths).status().state == "running"


def test_restarts_on_failure_until_the_burst_is_over(service, manager):
    release = service.stage("one", "--exit-at-once", "3", restart=RestartPolicy(0.02, 3, 60))
    manager.start(release.path)
    wait_until(lambda: manager.status().state == "failed")
    status = manager.status()
    assert (status.restarts, status.exit_status, status.pid) == (2, 3, None)
    assert "started 3 times within 60 s" in status.message
    assert sum("cannot load the model: one" in line for line in manager.log_tail(50)) == 3


def test_burst_counts_within_the_interval_only(service, manager):
    release = service.stage("one", "--exit-at-once", "3", restart=RestartPolicy(0.3, 2, 0.2))
    manager.start(release.path)
    wait_until(lambda: manager.status().restarts >= 3)
    assert manager.status().active


def test_killed_server_is_restarted(service, manager):
    release = service.stage("one")
    manager.start(release.path)
    service.wait_for_mark("one")
    first = manager.status().pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: manager.status().restarts == 1)
    service.wait_for_mark("one")
    status = manager.status()
    assert status.pid != first
    assert status.exit_signal == "SIGKILL"


def test_end_by_a_signal_without_a_name_is_told(service, manager):
    argv = ("/bin/sh", "-c", "kill -35 $$")
    manager.start(service.stage("one", argv=argv, restart=RestartPolicy(0.02, 1, 60)).path)
    wait_until(lambda: manager.status().state == "failed")
    assert manager.status().exit_signal == "signal 35"


def test_clean_exit_is_not_restarted(service, manager):
    release = service.stage("one", argv=("/bin/true",))
    manager.start(release.path)
    wait_until(lambda: manager.status().state == "stopped")
    assert not manager.status().asked_to_stop
    assert manager.status().restarts == 0


def test_ignored_sigterm_ends_in_sigkill(service, manager):
    release = service.stage("one", "--ignore-term", stop_timeout=0.3)
    manager.start(release.path)
    service.wait_for_mark("one")
    begin = time.monotonic()
    report = manager.stop()
    assert report.clean
    assert 0.3 <= time.monotonic() - begin < 5
    assert manager.status().exit_signal == "SIGKILL"
    assert any("did not end within 0.3 s" in line for line in manager.log_tail(20))


@pytest.mark.parametrize("where", ["group", "session"])
def test_grandchild_is_found_killed_and_reported(service, manager, where):
    """L4, also for one that left the process group and lost its parent."""
    release = service.stage("one", "--grandchild", where, stop_timeout=0.5)
    manager.start(release.path)
    service.wait_for_mark("one")
    grandchild = next(int(line.split()[1]) for line in manager.log_tail(9) if line.startswith("grandchild"))
    report = manager.stop()
    assert [item.pid for item in report.killed] == [grandchild]
    assert str(grandchild) in report.describe()
    assert report.clean
    wait_until(lambda: read_stat(grandchild) is None)


def test_grandchild_of_a_crashed_server_is_gone_before_the_restart(service, manager):
    release = service.stage("one", "--grandchild", "session")
    manager.start(release.path)
    service.wait_for_mark("one")
    grandchild = next(int(line.split()[1]) for line in manager.log_tail(9) if line.startswith("grandchild"))
    os.kill(manager.status().pid, signal.SIGKILL)
    wait_until(lambda: manager.status().restarts == 1)
    assert read_stat(grandchild) is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make a process that its supervisor may not kill")
def test_process_that_cannot_be_killed_is_reported_within_bounds(service, tmp_path):
    """L5, with a child of another user under a supervisor without CAP_KILL (capabilities(7))."""
    seen = tmp_path / "pid"
    code = f"setpriv --reuid=65534 --clear-groups sleep 30 & echo $! > {seen}; exec sleep 31"
    release = service.stage("one", argv=("/bin/sh", "-c", code), stop_timeout=0.2)
    command = ["setpriv", "--bounding-set=-kill", sys.executable, str(HERE / "start_and_stop.py")]
    command += [str(service.layout.root), str(release.path)]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    took = time.monotonic() - begin
    pid = int(seen.read_text())
    os.kill(pid, signal.SIGKILL)
    report = json.loads(done.stdout)
    assert report["leftovers"] == [[pid, "sleep"]]
    assert f"still running and not to be killed: {pid} (sleep)" in report["words"]
    assert (report["clean"], report["state"]) == (False, "failed")
    assert took < 15


def test_stop_of_a_failed_service_is_recorded_as_asked_for(service, manager):
    release = service.stage("one", "--exit-at-once", "3", restart=RestartPolicy(0.02, 1, 60))
    manager.start(release.path)
    wait_until(lambda: manager.status().state == "failed")
    assert not manager.status().asked_to_stop
    report = manager.stop()
    assert (report.killed, report.clean) == ((), True)
    assert (manager.status().state, manager.status().asked_to_stop) == ("stopped", True)


def test_lost_supervisor_is_told_and_the_rest_is_stopped(service, manager):
    release = service.stage("one", "--grandchild", "session")
    manager.start(release.path)
    service.wait_for_mark("one")
    os.kill(record(service).supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not manager.status().supervised)
    status = manager.status()
    assert status.state == "running"
    assert "supervisor is gone" in status.message
    assert service.mark() == "one"
    report = manager.stop()
    assert len(report.killed) == 2
    assert manager.status().state == "stopped"
    assert service.mark() is None


def test_all_gone_is_failed(service, manager):
    release = service.stage("one")
    manager.start(release.path)
    service.kill()
    wait_until(lambda: manager.status().pid is None)
    status = manager.status()
    assert (status.state, status.asked_to_stop) == ("failed", False)
    manager.start(release.path)
    service.wait_for_mark("one")


def test_recycled_pid_is_never_touched(service, manager):
    """A record whose pid now belongs to another process: start time or boot differ."""
    release = service.stage("one")
    manager.start(release.path)
    manager.stop()
    bystander = subprocess.Popen(["/bin/sleep", "60"])
    try:
        me = identify(bystander.pid)
        for stale in (ProcessId(me.pid, me.start - 1, me.boot), ProcessId(me.pid, me.start, "another boot")):
            file = Record(service.paths.supervisor / STATUS_FILE)
            replace(record(service), state="running", supervisor=stale, process=stale).write(file)
            file.close()
            assert manager.status().state == "failed"
            manager.stop()
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_second_start_and_busy_port_are_refused(service, manager):
    release = service.stage("one")
    manager.start(release.path)
    with pytest.raises(ToolkitError, match="runs already"):
        manager.start(release.path)
    service.wait_for_mark("one")
    other = ProcessManager(Layout(service.layout.root / "other").service("stub"))
    pid = manager.status().pid
    with pytest.raises(ToolkitError, match=rf"port {service.port} on 127.0.0.1 is in use by process {pid} "):
        other.start(release.path)


def test_flood_of_output_is_rotated_and_stops_nothing(service, manager):
    release = service.stage("one", argv=("/usr/bin/yes", "x" * 1000), log_max_size=1 << 20)
    manager.start(release.path)
    wait_until(lambda: service.paths.log.with_name("stub.log.2").exists())
    begin = time.monotonic()
    assert manager.stop().clean
    assert time.monotonic() - begin < 5
    assert manager.status().exit_signal == "SIGTERM"
    assert all(path.stat().st_size <= 1 << 20 for path in service.paths.log.parent.iterdir())


def test_missing_program_is_named(service, manager):
    release = service.stage("one", argv=("/no/such/python", "-m", "x"))
    with pytest.raises(ToolkitError, match="cannot start /no/such/python: No such file"):
        manager.start(release.path)
    assert manager.status().state == "stopped"


def test_working_folder_is_made_private_and_never_a_link(service, manager, tmp_path):
    release = service.stage("one")
    service.paths.cache.parent.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    service.paths.cache.symlink_to(elsewhere)
    with pytest.raises(ToolkitError, match=str(service.paths.cache)):
        manager.start(release.path)
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_limits_reach_the_process(service, manager):
    release = service.stage("one", limits={"nofile": 333, "core": 0})
    manager.start(release.path)
    text = Path(f"/proc/{manager.status().pid}/limits").read_text()
    assert "Max open files            333                  333" in text
