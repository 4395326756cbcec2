"""The whole job on a real host over SSH, with the real engine and the bundled pair."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import host_variables, write_inventory
from tests.hosts.machines import Host
from toolkit.errors import UnreachableError
from toolkit.fleet.connections import Connections
from toolkit.fleet.many import at_once
from toolkit.inventory.host import Host as KnownHost

pytestmark = pytest.mark.timeout(300)

Command = Callable[..., subprocess.CompletedProcess[str]]
NAME = "systemd-cpu"
KEY = "of-the-test-9c1f"
SETS = ("--set", f"host.python={sys.executable}", "--set", "service.api_key.env=SERVER_KEY")
PROGRAM = Path(sys.executable).parent / "ddtoolkit"


@pytest.fixture(scope="module")
def hosts(make_host: MakeHost) -> tuple[Host, Host]:
    return tuple(
        make_host(release, name=name, engine=True, disk="4G")
        for release, name in (("bookworm", "ct200"), ("trixie", "ct201"))
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the load balancer's hooks write."""
    return tmp_path_factory.mktemp("balancer") / "log"


@pytest.fixture(scope="module")
def inventory(hosts: tuple[Host, Host], log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def hook(word: str, host: Host) -> list[str]:
        return [sys.executable, "-c", f"open({str(log)!r}, 'a').write('{word} {host.name} ')"]

    return write_inventory(
        tmp_path_factory.mktemp("inventory") / "inventory.yaml",
        hosts,
        {
            host.name: {
                "ddtoolkit_profiles": [NAME],
                "ddtoolkit_drain": hook("drain", host),
                "ddtoolkit_undrain": hook("undrain", host),
            }
            for host in hosts
        },
    )


@pytest.fixture(scope="module")
def ddtoolkit(inventory: Path) -> Command:
    """The command with the hosts' inventory; it has to end with the status that is named."""

    def run(*arguments: str, status: int = 0, key: str = KEY) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM, *arguments, "-i", inventory]
        environment = os.environ | {"SERVER_KEY": key}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=280, env=environment
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert KEY not in done.stdout + done.stderr
        return done

    return run


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = {host: item["result"] for host, item in json.loads(done.stdout)["hosts"].items()}
    return found


def deploy(ddtoolkit: Command) -> dict[str, Any]:
    return results(ddtoolkit("deploy", "profile", NAME, *SETS, "--batch", "2", "--yes", "--json"))


@pytest.fixture(scope="module")
def first(ddtoolkit: Command) -> dict[str, Any]:
    """The first deploy of both hosts."""
    return deploy(ddtoolkit)


def served_pids(ddtoolkit: Command) -> dict[str, int]:
    found = results(ddtoolkit("status", NAME, "--json"))
    assert all(item[0]["state"] == "running" for item in found.values()), found
    return {host: item[0]["pid"] for host, item in found.items()}


def test_both_hosts_are_accepted_and_enabled(first: dict[str, Any], hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        assert first[host.name]["outcome"]["status"] == "committed"
        assert first[host.name]["report"]["verdict"] == "accepted"
        unit = f"ddtoolkit-{NAME}"
        assert host.root(["systemctl", "is-enabled", unit]).stdout.strip() == "enabled"


def test_the_key_reaches_the_server_and_nobody_else(first: dict[str, Any], hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    assert completion_status(host, KEY) == "200"
    assert completion_status(host, "wrong") == "401"
    shown = host.root(["sh", "-c", f"ps axeww; systemctl cat ddtoolkit-{NAME}; journalctl -o cat"]).stdout
    assert "toolkit.ddtree.server" in shown
    assert KEY not in shown
    readable = ["su", "-s", "/bin/sh", "ddtoolkit", "-c", f"grep -rl {KEY} /opt/ddtoolkit /var/lib/ddtoolkit"]
    assert host.root(readable, check=False).stdout == ""


def test_nothing_is_done_twice(first: dict[str, Any], ddtoolkit: Command) -> None:
    pids = served_pids(ddtoolkit)
    for result in deploy(ddtoolkit).values():
        assert result["plan"]["empty"]
        assert result["outcome"] is None
    assert served_pids(ddtoolkit) == pids


def test_the_output_of_all_servers_is_one_document(first: dict[str, Any], ddtoolkit: Command) -> None:
    for result in results(ddtoolkit("logs", "-n", "3", "--json")).values():
        assert (result["service"], len(result["lines"])) == (NAME, 3)


def test_a_unit_is_rendered_as_the_host_has_it(
    first: dict[str, Any], ddtoolkit: Command, hosts: tuple[Host, Host]
) -> None:
    refused = ddtoolkit("render", NAME, *SETS, status=2)
    assert "2 match" in refused.stderr
    one = ("render", NAME, *SETS, "--limit", "ct200")
    unit = hosts[0].path(f"/etc/systemd/system/ddtoolkit-{NAME}.service").read_text(encoding="utf-8")
    assert ddtoolkit(*one).stdout == unit
    other = ddtoolkit(*one, "--set", "speculative.budget=9").stdout
    assert other.startswith("# RELEASE_ID stands for ")
    release = first["ct200"]["release"]
    expected = unit.replace(release, "RELEASE_ID").replace('budget" "8"', 'budget" "9"')
    assert "".join(line for line in other.splitlines(True) if line[0] != "#") == expected


def test_the_checks_run_on_every_host_against_its_own_address(
    first: dict[str, Any], ddtoolkit: Command, hosts: tuple[Host, Host], inventory: Path
) -> None:
    """One host is given a second for them, which no host can make; the other is stopped."""
    release = hosts[0].path(f"/opt/ddtoolkit/services/{NAME}/releases/{first['ct200']['release']}")
    profile = json.loads((release / "profile.json").read_text(encoding="utf-8"))
    profile["acceptance"]["time_limit"] = 1.0
    hurried = release / "recorded.json"
    hurried.write_text(json.dumps({"profile": profile, "swapped": []}), encoding="utf-8")
    hosts[1].root(["systemctl", "stop", f"ddtoolkit-{NAME}"])
    try:
        shown = ddtoolkit("test", status=1)
        told = json.loads(ddtoolkit("test", NAME, "--json", status=1).stdout)
    finally:
        hurried.unlink()
        hosts[1].root(["systemctl", "start", f"ddtoolkit-{NAME}"])
    assert re.search(r"^ct200 +refused ", shown.stdout, re.MULTILINE)
    assert re.search(r"^ct201 +not tested", shown.stdout, re.MULTILINE)
    assert "ct200: " in shown.stderr
    assert f"ct201: {NAME}: there is nothing to test: it is stopped" in shown.stderr
    about = f"{NAME} -i {inventory} --limit ct201"
    assert f"next: ddtoolkit status {about}; then: ddtoolkit start {about}" in shown.stderr
    report = told["hosts"]["ct200"]["result"]
    assert (report["verdict"], report["server"]["url"]) == ("refused", "http://127.0.0.1:30000")
    assert (told["exit_code"], told["hosts"]["ct201"]["ok"]) == (1, False)
    ddtoolkit("test", NAME, "--url", "http://127.0.0.1:1", status=2)


def test_a_new_value_of_a_secret_is_planned(first: dict[str, Any], ddtoolkit: Command) -> None:
    shown = ddtoolkit("plan", NAME, *SETS, "--exit-code", key="another", status=7)
    assert shown.stdout.count("service.api_key has a new value") == 2


def completion_status(host: Host, key: str) -> str:
    body = json.dumps({"prompt": "def f(", "max_tokens": 2})
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-d", body]
    command += ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
    url = f"http://127.0.0.1:{host.forward(30000)}/v1/completions"
    return subprocess.run([*command, url], capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_refused_deploy_leaves_the_old_key(
    first: dict[str, Any], ddtoolkit: Command, hosts: tuple[Host, Host]
) -> None:
    sets = (*SETS, "--set", "acceptance.min_acceptance_length=7", "--limit", "ct200", "--yes", "--json")
    refused = results(ddtoolkit("deploy", "profile", NAME, *sets, key="another-3d2a", status=5))
    assert refused["ct200"]["outcome"]["serving"] == first["ct200"]["release"]
    assert completion_status(hosts[0], KEY) == "200"
    assert completion_status(hosts[0], "another-3d2a") == "401"


def test_a_worse_swap_is_undone_and_recorded(first: dict[str, Any], ddtoolkit: Command) -> None:
    swapped = ddtoolkit(
        "swap", "--set", "speculative.budget=7", "--set", "speculative.topk_cap=1",
        "--set", "speculative.debug_metrics=true", "--limit", "ct200", "--yes", "--json", status=5,
    )  # fmt: skip
    assert "speculative.budget: 8 -> 7" in swapped.stderr
    outcome = results(swapped)["ct200"]["outcome"]
    assert outcome["status"] == "rolled_back"
    assert "acceptance_length" in outcome["message"]
    assert outcome["serving"] == first["ct200"]["release"]

    history = results(ddtoolkit("history", "--json"))
    entries = history["ct200"]["entries"]
    assert [entry["outcome"] for entry in entries] == ["committed", *["rolled_back"] * 2]
    assert all("key SHA256:" in entry["who"] and entry["who"].endswith("as deploy") for entry in entries)
    assert len(history["ct201"]["entries"]) == 1


def test_a_swap_that_needs_provisioning_changes_nothing_and_says_so(
    first: dict[str, Any], ddtoolkit: Command
) -> None:
    pids = served_pids(ddtoolkit)
    sets = ("--set", "host.packages=[not-installed-here]")
    refused = ddtoolkit("swap", NAME, *sets, "--limit", "ct200", "--yes", status=1)
    assert "package not-installed-here is missing" in refused.stderr
    assert "ddtoolkit deploy profile" in refused.stderr
    assert served_pids(ddtoolkit) == pids


def test_hosts_restart_in_turn_each_drained(first: dict[str, Any], ddtoolkit: Command, log: Path) -> None:
    before = served_pids(ddtoolkit)
    log.unlink(missing_ok=True)
    ddtoolkit("restart", "--yes")
    assert log.read_text(encoding="utf-8").split() == [
        "drain", "ct200", "undrain", "ct200", "drain", "ct201", "undrain", "ct201",
    ]  # fmt: skip
    after = served_pids(ddtoolkit)
    assert all(after[host] != before[host] for host in before)


def test_hosts_are_locked_all_or_none(
    first: dict[str, Any], ddtoolkit: Command, hosts: tuple[Host, Host], inventory: Path
) -> None:
    pids = served_pids(ddtoolkit)
    last = KnownHost("ct201", host_variables(hosts[1]))
    with Connections([last]) as held:
        held.reserve("ct201", NAME, "something long", wait=0)
        refused = ddtoolkit("restart", "--yes", "--json", "--lock-wait", "1", status=3)
        token = results(ddtoolkit("lock", "show", "--limit", "ct201", "--json"))["ct201"]["holder"]["token"]
    shown = json.loads(refused.stdout)["hosts"]
    assert "something long" in shown["ct201"]["error"]
    assert re.search(
        r"^ct201: .* is locked by .*: something long; waiting for it, 1 s at most$", refused.stderr, re.M
    )
    about = f"-i {inventory} --limit ct201"
    assert f"ddtoolkit lock release {about} {token} --service {NAME}" in shown["ct201"]["hint"]
    assert shown["ct200"]["skipped"] == "not begun, since ct201 could not be locked"
    assert served_pids(ddtoolkit) == pids
    for host in ("ct200", "ct201"):
        lock = results(ddtoolkit("lock", "show", NAME, "--limit", host, "--json"))
        assert lock[host]["holder"] is None


def test_an_unreachable_host_hides_no_other(
    first: dict[str, Any], ddtoolkit: Command, inventory: Path, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    lost = tmp_path / "inventory.yaml"
    lost.write_text(
        inventory.read_text(encoding="utf-8").replace(f"ansible_port: {hosts[0].port}", "ansible_port: 9"),
        encoding="utf-8",
    )
    done = subprocess.run(
        [PROGRAM, "status", NAME, "--json", "-i", lost],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 4
    shown = json.loads(done.stdout)["hosts"]
    assert "no SSH at 127.0.0.1 port 9" in shown["ct200"]["error"]
    assert shown["ct201"]["result"][0]["state"] == "running"
    pids = served_pids(ddtoolkit)
    more = ["--set", "speculative.budget=7", "--yes", "--json"]
    done = subprocess.run(
        [PROGRAM, "deploy", "profile", NAME, *SETS, *more, "-i", lost],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"SERVER_KEY": KEY},
    )
    assert done.returncode == 4, done.stdout + done.stderr
    shown = json.loads(done.stdout)["hosts"]
    assert shown["ct200"]["hint"].endswith("; or deploy the others without it: --limit '!ct200'")
    assert shown["ct201"]["skipped"] == "not begun, since ct200 could not be planned"
    assert "speculative.budget: " in done.stderr
    assert served_pids(ddtoolkit) == pids


def test_a_host_that_vanishes_is_told_and_the_other_one_is_done(
    first: dict[str, Any], hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6."""
    monkeypatch.setattr("toolkit.remote.agent.SILENCE", 3.0)
    with Connections([KnownHost(host.name, host_variables(host)) for host in hosts]) as connections:
        for host in hosts:
            connections.open(host.name)
        hosts[0].cut()
        begin = time.monotonic()
        try:
            lost, done = at_once(
                ["ct200", "ct201"], lambda name: connections.call(name, "status", {"service": NAME}), limit=2
            )
        finally:
            hosts[0].restore()
    assert isinstance(lost.error, UnreachableError)
    assert "ct200: the SSH connection was lost: it was silent for 3 s" in lost.error.message
    assert done.value[0]["state"] == "running"
    assert time.monotonic() - begin < 15


def test_a_broken_connection_is_taken_up_again(
    first: dict[str, Any], inventory: Path, hosts: tuple[Host, Host]
) -> None:
    host = hosts[0]
    command = [PROGRAM, "restart", NAME, "--yes", "--limit", "ct200", "-i", inventory]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        said = []
        for line in running.stderr:
            said.append(line)
            if "start_new" in line:
                # One may have ended between being listed and being killed.
                kill = "for pid in $(pgrep -f 'sshd: [d]eploy'); do kill $pid || :; done"
                host.root(["sh", "-c", kill])
    text = "".join(said)
    assert running.returncode == 0, text
    assert "reconnect" in text
    assert "ct200: restart: committed" in text


def test_one_interrupt_ends_the_command_and_says_what_goes_on(
    first: dict[str, Any], ddtoolkit: Command, inventory: Path, log: Path
) -> None:
    log.unlink(missing_ok=True)
    command = [PROGRAM, "restart", NAME, "--yes", "--limit", "ct200", "-i", inventory]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "start_new" in line:
                break
        running.send_signal(signal.SIGINT)
        begin = time.monotonic()
        said = running.stderr.read()
        assert running.wait(20) == 130
    assert time.monotonic() - begin < 5
    assert "goes on on its host by itself; drained, and not put back: ct200\n" in said
    about = f"{NAME} -i {inventory} --limit ct200"
    status, start = f"ddtoolkit status {about}", f"ddtoolkit start {about}"
    assert f"next: {status}; once it has ended, this puts back what serves: {start}\n" in said
    assert log.read_text(encoding="utf-8").split() == ["drain", "ct200"]
    ddtoolkit("start", NAME, "--yes", "--limit", "ct200", "--lock-wait", "60")
    assert log.read_text(encoding="utf-8").split() == ["drain", "ct200", "undrain", "ct200"]
    served_pids(ddtoolkit)


def drifts(ddtoolkit: Command, *more: str, status: int = 7) -> list[dict[str, str]]:
    done = ddtoolkit("drift", NAME, *SETS, *more, "--limit", "ct200", "--json", status=status)
    found: list[dict[str, str]] = results(done)["ct200"]
    return found


BASE = f"/opt/ddtoolkit/services/{NAME}"
UNIT = f"/etc/systemd/system/ddtoolkit-{NAME}.service"
DRIFTS = [
    ("chmod 0777 /opt/ddtoolkit/envs", "chmod 0755 /opt/ddtoolkit/envs", "mode 0777, not 0755"),
    (f"chown deploy {BASE}", f"chown root {BASE}", "belongs to deploy, not to root"),
    (f"chmod 0666 {UNIT}", f"chmod 0644 {UNIT}", "mode 0666, not 0644"),
    (f"cp {UNIT} /u; echo '# x' >> {UNIT}", f"cp /u {UNIT}", "is not the one that was installed"),
    (
        f"mkdir {UNIT}.d; printf '[Service]\\nNice=5\\n' > {UNIT}.d/n.conf; systemctl daemon-reload",
        f"rm -r {UNIT}.d; systemctl daemon-reload",
        "n.conf changes the unit",
    ),
    (
        f"systemctl -q disable ddtoolkit-{NAME}",
        f"systemctl -q enable ddtoolkit-{NAME}",
        "is not started at boot",
    ),
    (
        "systemctl -q disable ddtoolkit-recover.service",
        "systemctl -q enable ddtoolkit-recover.service",
        "is not run at boot",
    ),
    (
        f"f=$(ls {BASE}/current/profile.json); cp $f /p; sed -i s/16/17/ $f",
        f"cp /p {BASE}/current/profile.json; chmod 0444 {BASE}/current/profile.json",
        "is not the one that was deployed",
    ),
    (f"chmod 0666 {BASE}/current/unit.json", f"chmod 0444 {BASE}/current/unit.json", "may write it"),
    (
        "echo >> $(ls /opt/ddtoolkit/envs/*/toolkit/layout.py)",
        "f=$(ls /opt/ddtoolkit/envs/*/toolkit/layout.py); head -c -1 $f > /l; cat /l > $f",
        "its files are not those that were built",
    ),
    (
        f"touch /var/cache/ddtoolkit/{NAME}/stranger",
        f"rm /var/cache/ddtoolkit/{NAME}/stranger",
        "belongs to root, not to ddtoolkit",
    ),
]


def test_no_drift_right_after_a_deploy(first: dict[str, Any], ddtoolkit: Command) -> None:
    assert results(ddtoolkit("drift", *SETS, "--json")) == {"ct200": [], "ct201": []}
    # Without them it is held against the profile with what the release was deployed with.
    done = ddtoolkit("drift", "--json")
    assert results(done) == {"ct200": [], "ct201": []}
    assert f"the profile with {shlex.join(SETS)}, as its release was deployed" in done.stderr
    lost = f"deployed with {shlex.join(SETS)}, this one is not"
    assert lost in ddtoolkit("plan", NAME, "--limit", "ct200").stdout


def test_drifts_that_hands_make_are_found(
    first: dict[str, Any], hosts: tuple[Host, Host], ddtoolkit: Command
) -> None:
    assert drifts(ddtoolkit, status=0) == []
    for make, mend, said in DRIFTS:
        hosts[0].root(["sh", "-c", make])
        found = [item["found"] for item in drifts(ddtoolkit)]
        assert any(said in item for item in found), (make, found)
        hosts[0].root(["sh", "-c", mend])
    ddtoolkit("restart", NAME, "--yes", "--limit", "ct200")  # younger than its unit file again
    assert drifts(ddtoolkit, status=0) == []


def test_a_changed_key_of_the_profile_is_a_drift(first: dict[str, Any], ddtoolkit: Command) -> None:
    found = {item["subject"]: item["found"] for item in drifts(ddtoolkit, "--set", "speculative.budget=32")}
    assert found["speculative.budget"] == "8 is deployed; the profile has 32"


def test_a_removal_whose_connection_breaks_is_brought_to_its_end_there(
    first: dict[str, Any], inventory: Path, hosts: tuple[Host, Host]
) -> None:
    host = hosts[1]
    # A service below a root of its own goes on being managed by the toolkit's code that is there.
    host.root(["mkdir", "-p", "/srv/o/services/other"])
    record = host.path(f"/root/.local/state/ddtoolkit/services/{NAME}.json")
    record.with_name("other.json").write_text('{"root": "/srv/o"}')
    command = [PROGRAM, "uninstall", NAME, "--purge", "--yes", "--limit", "ct201", "-i", inventory]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        said = []
        for line in running.stderr:
            said.append(line)
            if "stop_old" in line:
                host.break_connections()
    assert running.returncode == 4, said
    assert any("the removal of systemd-cpu goes on there by itself" in line for line in said), said
    end = time.monotonic() + 20
    while host.root(["id", "ddtoolkit"], check=False).returncode == 0:
        assert time.monotonic() < end, host.root(["ps", "ax"]).stdout
        time.sleep(0.2)
    assert sorted(path.name for path in host.path("/opt/ddtoolkit").iterdir()) == ["bin", "tool"]
