"""The test hosts themselves: that they are what tests take them for, and that they leave nothing behind."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.hosts import guard, needs
from tests.hosts.inventory import write_inventory
from tests.hosts.network import Network

ROOT = Path(__file__).parents[2]
BOOT_ID = "/proc/sys/kernel/random/boot_id"
CHILD = """\
import sys, time
from tests.hosts.machines import Host
from tests.hosts.network import Network
network = Network()
host = Host(network)
print(network.folder, network.cgroup, network._guard.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(network):
    """A process with a host of its own: its Popen, folder, control group and the PID of its guard."""
    process = subprocess.Popen([sys.executable, "-c", CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    folder, cgroup, guard_pid = process.stdout.readline().split()
    yield process, Path(folder), Path(cgroup), int(guard_pid)
    process.kill()
    process.communicate()


def until(condition, limit=20.0):
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def runs(pid):
    """Whether a process exists and is more than an entry that its new parent has not collected."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def processes(cgroup):
    return [pid for procs in cgroup.rglob("cgroup.procs") for pid in procs.read_text().split()]


def test_a_host_runs_systemd_and_takes_commands(two_hosts):
    versions = []
    for host in two_hosts:
        versions.append(host.root(["systemctl", "--version"]).stdout.split()[1])
        assert host.run(["cat", "/proc/1/comm"]).stdout == "systemd\n"
        assert host.run(["id", "-un"]).stdout == "deploy\n"
        assert host.run(["sudo", "-n", "id", "-un"]).stdout == "root\n"
        assert host.run(["hostname"]).stdout == f"{host.name}\n"
        assert "Started" in host.journal("-u", "ssh")
    assert versions == ["252", "257"]


def test_arguments_and_input_arrive_unchanged(host):
    words = ["a b", "$HOME", "it's", '"', "*", ""]
    for run in (host.run, host.root):
        assert run(["printf", "%s|", *words]).stdout == "|".join(words) + "|"
        assert run(["cat"], input="one\ntwo").stdout == "one\ntwo"
        assert run(["false"], check=False).returncode == 1
        with pytest.raises(RuntimeError, match="ended with 1"):
            run(["false"])


def test_hosts_reach_each_other(two_hosts):
    script = "import socket, sys; print(socket.create_connection((sys.argv[1], 22), 5).recv(4))"
    for here, there in (two_hosts, two_hosts[::-1]):
        assert here.run(["python3", "-c", script, there.ip]).stdout == "b'SSH-'\n"


def test_nothing_outside_is_reachable(host):
    script = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    assert "No route to host" in host.run(["python3", "-c", script], check=False).stderr


@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_the_engine_runs_inside_without_the_checkout(make_host, release):
    host = make_host(release, engine=True)
    assert host.run([sys.executable, "-c", "import torch, pydantic; print('both')"]).stdout == "both\n"
    assert "No module named" in host.run([sys.executable, "-c", "import toolkit.errors"], check=False).stderr
    assert host.run(["touch", f"{sys.prefix}/x"], check=False).returncode == 1


@pytest.mark.parametrize("way", ["reboot", "power_cut"])
def test_a_reboot_keeps_files_and_the_journal(host, way):
    first = host.root(["cat", BOOT_ID]).stdout
    host.root(["systemd-cat", "echo", f"said before {way}"])
    host.root(["journalctl", "--sync"])
    host.path("/etc/kept").write_text("kept")
    getattr(host, way)()
    assert host.root(["cat", BOOT_ID]).stdout != first
    assert host.run(["cat", "/etc/kept"]).stdout == "kept"
    assert f"said before {way}" in host.journal()


def test_files_go_in_and_out(host, tmp_path):
    (tmp_path / "sent" / "deep").mkdir(parents=True)
    (tmp_path / "sent" / "deep" / "file").write_bytes(b"\0\xff")
    host.push(tmp_path / "sent", "/opt/new/sent")
    assert host.run(["stat", "-c", "%U", "/opt/new/sent/deep/file"]).stdout == "root\n"
    host.pull("/opt/new/sent", tmp_path / "back")
    host.pull("/opt/new/sent/deep/file", tmp_path / "file")
    for path in (tmp_path / "back" / "deep" / "file", tmp_path / "file"):
        assert path.read_bytes() == b"\0\xff"


def test_a_bind_is_read_only(make_host, tmp_path):
    (tmp_path / "here").write_text("bound")
    host = make_host(binds=[f"{tmp_path}:/srv/bound"])
    assert host.root(["cat", "/srv/bound/here"]).stdout == "bound"
    assert "Read-only" in host.root(["touch", "/srv/bound/here"], check=False).stderr


def test_a_cut_network_is_silent_until_it_is_restored(two_hosts):
    host, other = two_hosts
    script = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1)"
    session = subprocess.Popen([*host.ssh(), "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    session.stdin.write(b"a")
    session.stdin.flush()
    assert session.stdout.read(1) == b"a"
    host.cut()
    # As after some minutes: without a known neighbor, a new connection would be refused and not just hang.
    host.network.inside("ip", "neighbor", "flush", "dev", "br0")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            host.run(["true"], timeout=1)
        assert other.run(["python3", "-c", script, host.ip], check=False).returncode == 1
        assert host.root(["echo", "still up"]).stdout == "still up\n"
        assert session.poll() is None
    finally:
        host.restore()
    assert session.communicate(b"b", timeout=30) == (b"b", None)
    host.run(["true"])
    other.run(["python3", "-c", script, host.ip])


def test_latency_can_be_added(host):
    def banner_seconds():
        start = time.monotonic()
        with socket.create_connection((host.address, host.port)) as connection:
            connection.recv(4)
        return time.monotonic() - start

    host.delay(1.0)
    assert banner_seconds() >= 1.0
    host.delay(0)
    assert banner_seconds() < 1.0


def test_a_full_disk(make_host):
    host = make_host(disk="64M")
    host.fill_disk(leave=1 << 20)
    host.root(["dd", "if=/dev/zero", "of=/var/small", "bs=64K", "count=1"])
    assert "No space left" in host.root(["dd", "if=/dev/zero", "of=/var/x", "bs=4M"], check=False).stderr
    host.path("/var/x").unlink()
    host.empty_disk()
    host.root(["dd", "if=/dev/zero", "of=/var/x", "bs=4M", "count=1"])


def test_a_port_of_the_host_is_reached_from_here(host):
    host.path("/srv/page").write_text("served")
    host.root(["systemd-run", "-q", "python3", "-m", "http.server", "-b", "127.0.0.1", "-d", "/srv", "8080"])
    url = f"http://127.0.0.1:{host.forward(8080)}/page"

    def served():
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.read() == b"served"
        except OSError:
            return False

    assert until(served)


def test_ansible_reaches_every_host_by_the_inventory(two_hosts, tmp_path):
    path = write_inventory(tmp_path / "hosts.yaml", two_hosts, {two_hosts[0].name: {"color": "red"}})
    assert "127.0.0.1" not in two_hosts[0].network.known_hosts.read_text()
    environment = {**os.environ, "HOME": str(tmp_path), "ANSIBLE_HOST_KEY_CHECKING": "True"}
    environment["ANSIBLE_SSH_ARGS"] = "-o ControlMaster=no"  # a socket's path may not be as long as tmp_path
    for key in ("PYTHONPATH", "PYTHONWARNINGS"):
        environment.pop(key, None)
    command = [str(Path(sys.executable).with_name("ansible")), "all", "--one-line", f"--inventory={path}"]
    command += ["--become", "--module-name=command", "--args=echo {{ color | default('none') }} as root"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for host, color in zip(two_hosts, ("red", "none"), strict=True):
        assert any(
            line.startswith(host.name) and f"{color} as root" in line for line in done.stdout.split("\n")
        )


def test_a_stopped_host_is_gone(make_host):
    host = make_host()
    assert processes(host._cgroup)
    host.stop()
    assert not host._cgroup.exists()
    with pytest.raises(OSError) as refused:  # noqa: PT011
        socket.create_connection((host.address, host.port))
    assert refused.value.errno == errno.ECONNREFUSED


def test_nothing_is_left_after_close():
    network = Network()
    namespace = Path(network.namespace).stat().st_ino
    network.lower("bookworm")
    network.close()
    assert not network.folder.exists()
    assert not network.cgroup.exists()
    assert not namespace_users(namespace)


def test_nothing_is_left_after_the_run_was_killed(child):
    process, folder, cgroup, _ = child
    pids = processes(cgroup)
    assert len(pids) > 5
    process.kill()
    assert until(lambda: not folder.exists() and not cgroup.exists())
    assert not [pid for pid in pids if runs(pid)]


def test_the_next_run_sweeps_what_a_killed_guard_left(child):
    process, folder, cgroup, guard_pid = child
    guard.sweep()
    assert folder.exists(), "a living run is nobody else's to sweep"
    os.kill(guard_pid, signal.SIGKILL)
    process.kill()
    process.wait()
    assert until(lambda: not runs(guard_pid))
    assert processes(cgroup)
    guard.sweep()
    assert not folder.exists()
    assert not cgroup.exists()


def test_without_root_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert needs.why_not() == "test hosts need root"


def namespace_users(inode):
    users = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            users += [path] if path.stat().st_ino == inode else []
        except OSError:
            continue
    return users
