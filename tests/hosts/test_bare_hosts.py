"""Two bare hosts, one made ready and deployed by the command, one by ansible-playbook; then given back.

Neither reaches a package index: their wheels come from this machine. Before, and on the way, they are struck.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import apt, wheelhouse
from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host

pytestmark = pytest.mark.timeout(600)

NAME = "systemd-cpu"
STORE = "/var/lib/ddtoolkit/wheels"
SCRIPTS = Path(sys.executable).parent
PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
BY_COMMAND, BY_PLAYBOOK = "ct200", "ct201"
# What two hosts that were made at different times never share, and what only a run leaves.
UNLIKE = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
LEFT_OUT = ("/proc", "/sys", "/run", "/tmp", "/var/tmp", "/var/log/journal", "/var/lib/systemd", "/home")
# apt's and dpkg's own: package lists and their caches, logs, the state before the last change.
APT = (
    r"/var/lib/apt/(lists|extended_states)|/var/cache/apt/|/var/log/(apt/|dpkg\.log)|/var/lib/dpkg/[a-z]+-old"
)
RUNTIME = re.compile(
    r"/__pycache__|/\.build/hashes/|\.lock$|/(passwd|group|shadow|gshadow)-$|/reserve\.|-journal|" + APT
)
NTP_UNIT = """[Unit]
Description=A client for the test
[Service]
ExecStart=/bin/sleep infinity
[Install]
WantedBy=sysinit.target
"""
# The test's hosts are containers, where the time is another's business.
NO_CONTAINER = "#!/bin/sh\nexit 1\n"

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def house() -> Path:
    if (reason := wheelhouse.why_not()) is not None:
        pytest.skip(reason)
    return wheelhouse.filled()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages that the profile asks for, and what they depend on."""
    folder = tmp_path_factory.mktemp("packages")
    apt.package(folder, "probe-tool", "1.0-1", {"/usr/bin/probe-tool": "#!/bin/sh\n"}, Depends="probe-lib")
    apt.package(folder, "probe-lib", "1.0-1")
    for version in ("1.0-1", "2.0-1"):
        apt.package(folder, "probe-pinned", version)
    unit = {"/lib/systemd/system/systemd-timesyncd.service": NTP_UNIT}
    apt.package(folder, "systemd-timesyncd", "252.1-1", unit)
    apt.index(folder)
    return folder


@pytest.fixture(scope="module")
def hosts(repository: Path, make_host: MakeHost) -> dict[str, Host]:
    binds = [f"{repository}:{apt.REPOSITORY}"]
    made = {
        name: make_host("bookworm", name=name, binds=binds, disk="4G") for name in (BY_COMMAND, BY_PLAYBOOK)
    }
    for host in made.values():
        apt.forget_sources(host)
        apt.add_source(host)
        host.root(["systemctl", "unmask", "systemd-timesyncd.service"])
        program = host.path("/usr/local/bin/systemd-detect-virt")
        program.write_text(NO_CONTAINER)
        program.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def before(hosts: dict[str, Host]) -> dict[str, set[str]]:
    """The files of each host before anything was done there."""
    return {name: files(host) for name, host in hosts.items()}


@pytest.fixture(scope="module")
def inventory(
    hosts: dict[str, Host], before: dict[str, set[str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("bare") / "inventory.yaml"
    return write_inventory(path, hosts.values(), {name: {"ddtoolkit_profiles": [NAME]} for name in hosts})


@pytest.fixture(scope="module")
def sets() -> list[str]:
    wanted = {
        "host.packages": "[probe-tool, probe-pinned=1.0-1]",
        "host.journal_max_size": "64MiB",
        "acceptance.speed_tolerance": "0.95",  # no subject of these tests, and others share the machine
    }
    return [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def ddtoolkit(inventory: Path) -> Command:
    def run(*arguments: str, host: str = BY_COMMAND, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [SCRIPTS / "ddtoolkit", *arguments, "-i", inventory, "--limit", host]
        return ended(command, os.environ, status)

    return run


@pytest.fixture(scope="module")
def playbook(inventory: Path, sets: list[str], house: Path) -> Command:
    settings = inventory.parent / "settings"
    ended(
        [SCRIPTS / "ddtoolkit", "render", NAME, "--format", "ansible", "--out", settings, *sets],
        os.environ,
        0,
    )

    def run(name: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [
            SCRIPTS / "ansible-playbook",
            "-i",
            inventory,
            PLAYBOOKS / name,
            "--limit",
            BY_PLAYBOOK,
            "-b",
        ]
        command += [
            "-e",
            f"ddtoolkit_settings_file={settings}/settings.json",
            "-e",
            f"ddtoolkit_service={NAME}",
            "-e",
            f"ddtoolkit_wheelhouse={house}",
        ]
        return ended([*command, *arguments], os.environ | {"ANSIBLE_PIPELINING": "True"}, status)

    return run


@pytest.fixture(scope="module")
def deployed(inventory: Path, hosts: dict[str, Host], playbook: Command, sets: list[str], house: Path) -> str:
    """Both hosts serve, each made ready in its own way; what the command said that was cut off twice."""
    host, said, broken = hosts[BY_COMMAND], [], set()
    command = [SCRIPTS / "ddtoolkit", "deploy", "profile", NAME, *sets, "--wheelhouse", house, "--yes", "-v"]
    command += ["-i", inventory, "--limit", BY_COMMAND]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            said.append(line)
            step = next((word for word in ("wheels", "libraries") if f"{BY_COMMAND}  {word} " in line), None)
            if step is not None and step not in broken:
                broken.add(step)
                await_start(host, step)
                host.break_connections()
    assert running.wait(580) == 0, "".join(said)
    playbook("site.yml", "-e", json.dumps({"ddtoolkit_ignore_checks": ["time"]}))
    return "".join(said)


def await_start(host: Host, step: str) -> None:
    """Wait until a good part of the wheels has come, or the environment is begun."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        parts = host.path(STORE).glob(".torch-*.part")
        if step == "wheels" and any(part.stat().st_size > 20_000_000 for part in parts):
            return
        if step == "libraries" and list(host.path("/opt/ddtoolkit/envs").glob("lib-*")):
            return
        time.sleep(0.02)
    raise AssertionError(f"{step} did not begin")


def ended(command: list[Any], environment: Any, status: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def files(host: Host) -> set[str]:
    """Mode, owner, group, path and link target of every file; folders' sizes and times are nobody's."""
    prune = " -o ".join(f"-path {path}" for path in LEFT_OUT)
    shown = host.root(["sh", "-c", f"find / -xdev \\( {prune} \\) -prune -o -printf '%M %u %g %p %l\\n'"])
    lines = (UNLIKE.sub("RELEASE", line) for line in shown.stdout.splitlines())
    return {line for line in lines if not RUNTIME.search(line)}


def recap(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    line = next(line for line in done.stdout.splitlines() if line.startswith(BY_PLAYBOOK) and "ok=" in line)
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}


def test_a_full_disk_keeps_the_toolkit_from_coming_and_leaves_no_half_of_it(
    ddtoolkit: Command, hosts: dict[str, Host], before: dict[str, set[str]], sets: list[str], house: Path
) -> None:
    host = hosts[BY_COMMAND]
    host.fill_disk(leave=1 << 20)
    try:
        done = ddtoolkit("plan", NAME, *sets, "--wheelhouse", str(house), status=1)
    finally:
        host.empty_disk()
    assert f"{BY_COMMAND}: the toolkit cannot be put there: " in done.stderr
    assert "No space left on device" in done.stderr
    assert list(host.path("/opt/ddtoolkit/tool").iterdir()) == []


def test_what_does_not_fit_is_refused_before_anything_is_copied(
    ddtoolkit: Command, hosts: dict[str, Host], before: dict[str, set[str]], sets: list[str], house: Path
) -> None:
    """H9, of the wheels and the environment."""
    host = hosts[BY_COMMAND]
    host.fill_disk(leave=400 << 20)
    try:
        done = ddtoolkit("deploy", "profile", NAME, *sets, "--wheelhouse", str(house), "--yes", status=1)
    finally:
        host.empty_disk()
    words = (
        rf"{BY_COMMAND}: not enough disk below {STORE}: wheels \S+ MB \+ the environment that is made of them"
    )
    assert re.search(words, done.stderr), done.stderr
    assert not host.path(STORE).exists()
    assert sorted(path.name for path in host.path("/opt/ddtoolkit").iterdir()) == ["tool"]


@pytest.fixture
def damaged(house: Path, tmp_path: Path) -> Path:
    """The wheelhouse with one wheel that is not what its checksums say."""
    folder = tmp_path / "house"
    folder.mkdir()
    for path in house.iterdir():
        (folder / path.name).symlink_to(path)
    wheel = next(folder.glob("uvicorn-*.whl"))
    data = bytearray(wheel.read_bytes())
    data[200] ^= 1
    wheel.unlink()
    wheel.write_bytes(data)
    return folder


def test_a_damaged_wheel_stops_the_deploy_before_anything_is_touched(
    ddtoolkit: Command, hosts: dict[str, Host], before: dict[str, set[str]], sets: list[str], damaged: Path
) -> None:
    wheel = next(damaged.glob("uvicorn-*.whl"))
    done = ddtoolkit("deploy", "profile", NAME, *sets, "--wheelhouse", str(damaged), "--yes", status=1)
    assert f"error: {wheel} is damaged: its sha256 is not that of SHA256SUMS; nothing was sent" in done.stderr
    assert sorted(path.name for path in hosts[BY_COMMAND].path("/opt/ddtoolkit").iterdir()) == ["tool"]


def test_too_little_space_ends_provisioning_with_the_numbers(
    playbook: Command, hosts: dict[str, Host], before: dict[str, set[str]]
) -> None:
    host = hosts[BY_PLAYBOOK]
    host.fill_disk(leave=100 << 20)
    try:
        done = playbook("provision.yml", status=2)
    finally:
        host.empty_disk()
    assert re.search(r"/opt/ddtoolkit/services has \d+ bytes free, \d+ are needed", done.stdout)
    assert "python3-venv" not in done.stdout


HOLD_DPKG = """
import fcntl, os, time
file = open("/var/lib/dpkg/lock-frontend", "w"); fcntl.lockf(file, fcntl.LOCK_EX)
print(os.getpid(), flush=True)
time.sleep(120)
"""


def test_who_holds_the_lock_of_dpkg_is_named_after_a_bounded_wait(
    playbook: Command, hosts: dict[str, Host], before: dict[str, set[str]]
) -> None:
    """S1."""
    host = hosts[BY_PLAYBOOK]
    with subprocess.Popen(
        [*host.ssh(), "sudo", "python3", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(HOLD_DPKG)
        holder.stdin.close()
        pid = holder.stdout.readline().strip()
        begin = time.monotonic()
        done = playbook("provision.yml", "-e", "ddtoolkit_dpkg_wait=2", status=2)
        host.root(["kill", pid])
    said = done.stdout + done.stderr
    assert re.search(
        rf"/var/lib/dpkg/lock-frontend is held by python3 \(pid {pid}, since .*\) after \d+ s", said
    )
    assert time.monotonic() - begin < 60
    assert "probe-tool" not in host.root(["dpkg-query", "--show"]).stdout


def test_a_bare_host_is_planned_without_being_touched(
    ddtoolkit: Command, hosts: dict[str, Host], before: dict[str, set[str]], sets: list[str], house: Path
) -> None:
    assert "from the package index" in ddtoolkit("plan", NAME, *sets).stdout
    shown = ddtoolkit("plan", NAME, *sets, "--wheelhouse", str(house)).stdout
    assert "nothing of ddtoolkit is there yet" in shown
    assert re.search(rf"wheels +\d+ files, \S+ MB, from {house} here\n", shown)
    assert f"the locked libraries of the embedded engine, from {STORE}\n" in shown
    grown = {
        line for line in files(hosts[BY_COMMAND]) - before[BY_COMMAND] if "/opt/ddtoolkit/tool" not in line
    }
    assert not {line for line in grown if not line.endswith(" /opt/ddtoolkit ")}


def test_check_mode_passes_on_a_bare_host(playbook: Command, inventory: Path) -> None:
    assert recap(playbook("site.yml", "--check"))["changed"] > 0


def test_both_ways_give_the_same_host(deployed: str, hosts: dict[str, Host]) -> None:
    ours, theirs = (files(hosts[name]) for name in (BY_COMMAND, BY_PLAYBOOK))
    assert sorted(ours ^ theirs) == []


def test_broken_connections_are_gone_on_with(deployed: str) -> None:
    """S5: while the wheels come, and while the environment is built."""
    assert re.search(
        rf"{BY_COMMAND}  libraries +lib-\w+: the locked libraries of .*, from {STORE}\n", deployed
    )
    assert re.search(r"was lost: .*; the wheels that have come stay there, connecting again", deployed)
    assert "the installation goes on, connecting again" in deployed
    (rest,) = re.findall(r"(\S+) MB sent and checked in", deployed)
    (first,) = re.findall(r"wheels +\d+ files, (\S+) MB, from", deployed)
    assert float(rest) < float(first) - 19


@pytest.mark.parametrize("name", [BY_COMMAND, BY_PLAYBOOK])
def test_packages_time_and_journal_are_seen_to(deployed: str, hosts: dict[str, Host], name: str) -> None:
    host = hosts[name]
    shown = host.root(
        ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${db:Status-Want};", "probe-*"]
    )
    assert shown.stdout == "probe-lib 1.0-1 install;probe-pinned 1.0-1 hold;probe-tool 1.0-1 install;"
    assert host.root(["systemctl", "is-active", "systemd-timesyncd"]).stdout == "active\n"
    limits = host.root(["systemd-analyze", "cat-config", "systemd/journald.conf"]).stdout
    assert f"SystemMaxUse={64 << 20}\n" in limits


def test_a_stopped_clock_and_a_changed_limit_are_drifts_that_a_deploy_ends(
    deployed: str, ddtoolkit: Command, hosts: dict[str, Host], sets: list[str]
) -> None:
    host = hosts[BY_COMMAND]
    ddtoolkit("drift", NAME, *sets)
    host.root(["systemctl", "stop", "systemd-timesyncd"])
    limit = host.path(f"/etc/systemd/journald.conf.d/ddtoolkit-{NAME}.conf")
    limit.write_text("[Journal]\nSystemMaxUse=1G\n")
    told = json.loads(ddtoolkit("drift", NAME, *sets, "--json", status=7).stdout)
    shown = " ".join(str(item) for item in told["hosts"][BY_COMMAND]["result"])
    assert "no NTP client runs: systemd-timesyncd.service is inactive" in shown
    assert f"the journal's limit in /etc/systemd/journald.conf.d/ddtoolkit-{NAME}.conf is not the" in shown
    pid = host.root(["systemctl", "show", "-P", "MainPID", f"ddtoolkit-{NAME}"]).stdout
    ddtoolkit("deploy", "profile", NAME, *sets, "--yes")
    ddtoolkit("drift", NAME, *sets)
    assert host.root(["systemctl", "show", "-P", "MainPID", f"ddtoolkit-{NAME}"]).stdout == pid


def test_a_second_run_changes_nothing(
    deployed: str, ddtoolkit: Command, playbook: Command, sets: list[str]
) -> None:
    assert recap(playbook("site.yml"))["changed"] == 0
    assert recap(playbook("site.yml", "--check"))["changed"] == 0
    assert "nothing to do" in ddtoolkit("deploy", "profile", NAME, *sets, "--yes", host=BY_PLAYBOOK).stderr
    seen = ddtoolkit("plan", NAME, *sets, "--check", host=BY_PLAYBOOK).stdout
    assert f"ansible on {BY_PLAYBOOK}: would change nothing" in seen


def test_a_swap_by_playbook_is_in_the_history_that_everyone_sees(
    deployed: str, ddtoolkit: Command, playbook: Command, hosts: dict[str, Host]
) -> None:
    change = json.dumps({"ddtoolkit_set": ["service.max_running_requests=8"]})
    assert recap(playbook("swap.yml", "-e", change))["changed"] == 1
    assert recap(playbook("swap.yml", "-e", change))["changed"] == 0
    assert "service.max_running_requests: 16 -> 8" in ddtoolkit("history", NAME, host=BY_PLAYBOOK).stdout
    on_host = hosts[BY_PLAYBOOK].root(["ddtoolkit", "history", NAME]).stdout
    assert "service.max_running_requests: 16 -> 8" in on_host
    told = json.loads(ddtoolkit("history", NAME, "--json", host=BY_PLAYBOOK).stdout)["hosts"][BY_PLAYBOOK]
    commands = [entry["command"] for entry in told["result"]["entries"]]
    assert re.fullmatch(rf"deploy profile {NAME} --set .* --ignore-check time", commands[0])
    assert recap(playbook("rollback.yml"))["changed"] == 1
    assert "rollback" in ddtoolkit("history", NAME, host=BY_PLAYBOOK).stdout


def test_a_bad_value_fails_the_playbook_with_its_reason(deployed: str, playbook: Command) -> None:
    done = playbook("swap.yml", "-e", '{"ddtoolkit_set": ["speculative.budgets=7"]}', status=2)
    assert "speculative.budget" in done.stdout + done.stderr


def test_prune_takes_out_of_the_store_what_no_lock_needs(
    deployed: str, ddtoolkit: Command, hosts: dict[str, Host]
) -> None:
    store = hosts[BY_COMMAND].path(STORE)
    before = sorted(path.name for path in store.iterdir())
    hosts[BY_COMMAND].root(["touch", "-d", "1 hour ago", f"{STORE}/old_thing-1.0-py3-none-any.whl"])
    shown = ddtoolkit("prune", "--yes").stdout
    assert f"{BY_COMMAND}: removed wheel {STORE}/old_thing-1.0-py3-none-any.whl (0 MiB)" in shown
    assert sorted(path.name for path in store.iterdir()) == before


def test_an_upgrade_has_nothing_to_do_on_this_version(
    deployed: str, ddtoolkit: Command, playbook: Command
) -> None:
    assert "nothing to do" in ddtoolkit("upgrade", NAME, "--yes").stderr
    assert recap(playbook("upgrade.yml"))["changed"] == 0


def test_an_upgrade_reads_the_wheels_that_it_brings_before_anything_is_touched(
    deployed: str, ddtoolkit: Command, hosts: dict[str, Host], damaged: Path
) -> None:
    host = hosts[BY_COMMAND]
    (made,) = host.path("/opt/ddtoolkit/envs").glob("lib-*/libraries.json")
    made.rename(made.with_name("aside"))
    (wheel,) = host.path(STORE).glob("uvicorn-*.whl")
    wheel.unlink()
    try:
        done = ddtoolkit("upgrade", NAME, "--wheelhouse", str(damaged), "--yes", status=1)
    finally:
        made.with_name("aside").rename(made)
    assert re.search(rf"  wheels: 1 files, \S+ kB, from {damaged} here, \d+ of \d+ are there\n", done.stderr)
    assert re.search(r"/uvicorn-.*\.whl is damaged: .*; nothing was sent", done.stderr), done.stderr


@pytest.mark.parametrize("way", [BY_COMMAND, BY_PLAYBOOK])
def test_a_purged_host_is_as_it_was(
    deployed: str,
    ddtoolkit: Command,
    playbook: Command,
    hosts: dict[str, Host],
    before: dict[str, set[str]],
    way: str,
) -> None:
    if way == BY_COMMAND:
        ddtoolkit("uninstall", NAME, "--purge", "--yes")
    else:
        playbook("uninstall.yml", "-e", "ddtoolkit_purge=true")
    assert sorted(files(hosts[way]) ^ before[way]) == []
    assert hosts[way].root(["find", "/home", "/root", "-name", ".ansible"]).stdout == ""
    units = hosts[way].root(["systemctl", "list-units", "--all", "--plain", "--no-legend", "ddtoolkit*"])
    assert not units.stdout
