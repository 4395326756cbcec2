"""Checkpoints on real hosts: one fetches from a publisher behind HTTPS, the others from that one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toolkit
from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from tests.hosts.network import Network
from tests.hosts.publisher import HttpsPublisher
from tests.weights.checkpoints import safetensors, sums

pytestmark = pytest.mark.timeout(480)

NAME = "systemd-cpu"
PROGRAM = Path(sys.executable).parent / "ddtoolkit"
PLAYBOOK = Path(sys.executable).parent / "ansible-playbook"
ROOT = Path(__file__).parents[2]
MODELS = "/var/lib/ddtoolkit/models"
LARGE = 12_000_000
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def hosts(make_host: MakeHost) -> tuple[Host, Host]:
    return tuple(
        make_host(release, name=name, engine=True, disk="4G")
        for release, name in (("bookworm", "ct200"), ("trixie", "ct201"))
    )


@pytest.fixture(scope="module")
def publisher(
    network: Network, hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpsPublisher]:
    """Publishes the bundled pair, and a checkpoint that is only large."""
    folder = tmp_path_factory.mktemp("published")
    for part in ("target", "drafter"):
        shutil.copytree(Path(toolkit.__file__).parent / "ddtree" / "bundled" / part, folder / part)
    (folder / "large").mkdir()
    for number in range(3):
        (folder / "large" / f"model-{number}.safetensors").write_bytes(safetensors(LARGE, number))
    for part in ("target", "drafter", "large"):
        sums(folder / part)
    made = HttpsPublisher(network, folder, tmp_path_factory.mktemp("publisher"))
    for host in hosts:
        made.trust_on(host)
    yield made
    made.close()


@pytest.fixture(scope="module")
def inventory(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    variables = {
        host.name: {"ddtoolkit_profiles": [NAME], "ddtoolkit_peer_address": host.ip} for host in hosts
    }
    return write_inventory(tmp_path_factory.mktemp("inventory") / "inventory.yaml", hosts, variables)


@pytest.fixture(scope="module")
def ddtoolkit(inventory: Path) -> Command:
    def run(*arguments: str, status: int = 0, host: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM, *arguments, "-i", inventory, *(["--limit", host] if host else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def sets(publisher: HttpsPublisher) -> list[str]:
    found = ["--set", f"host.python={sys.executable}"]
    for role in ("target", "drafter"):
        found += ["--set", f"model.{role}.source={publisher.url}folder/{role}/"]
        found += ["--set", f"model.{role}.revision=v1"]
    return found


@pytest.fixture(scope="module")
def deployed(
    ddtoolkit: Command, sets: list[str], publisher: HttpsPublisher
) -> tuple[dict[str, Any], set[str]]:
    """Both hosts serve what one of them has fetched; and which hosts asked the publisher for shards."""
    publisher.forget()
    done = ddtoolkit("deploy", "profile", NAME, *sets, "--batch", "2", "--yes", "--json")
    asked = {
        who for who, method, path, _ in publisher.requests() if method == "GET" and "safetensors" in path
    }
    return json.loads(done.stdout)["hosts"], asked


def large(publisher: HttpsPublisher) -> str:
    return f"{publisher.url}folder/large/"


def transfer_unit(host: Host) -> str:
    shown = host.root(["systemctl", "list-units", "--plain", "--no-legend", "ddtoolkit-weights-*"]).stdout
    return shown.split()[0] if shown.split() else ""


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not come to that")


def test_a_plan_tells_what_comes_from_where(
    ddtoolkit: Command, sets: list[str], hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    shown = ddtoolkit("models", "add", f"{publisher.url}folder/absent/", "--revision", "v1", status=1).stdout
    assert shown == ""
    wanted = f"weights      target@v1: it is not there; 9.7 MB from {publisher.url}folder/target/ at v1"
    plan = ddtoolkit("plan", NAME, *sets[2:]).stdout  # nothing of the toolkit is there yet
    assert plan.count("nothing of ddtoolkit is there yet") == plan.count(wanted) == 2
    assert plan.index("the locked libraries") < plan.index(wanted) < plan.index("nothing is built yet")
    assert ddtoolkit("plan", NAME, *sets).stdout.count(wanted) == 2
    for host in hosts:
        assert not host.path(f"{MODELS}/target@v1").exists()


def test_both_serve_and_one_has_fetched(
    deployed: tuple[dict[str, Any], set[str]], hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    results, asked = deployed
    for host in hosts:
        assert results[host.name]["result"]["outcome"]["status"] == "committed"
        unit = host.root(["systemctl", "show", f"ddtoolkit-{NAME}", "-p", "ExecStart"]).stdout
        assert f"{MODELS}/target@v1" in unit
        marker = json.loads(host.path(f"{MODELS}/target@v1/.weights.json").read_text())
        assert marker["source"] == f"{publisher.url}folder/target/ at v1"
    assert asked == {hosts[0].ip}


def test_nothing_of_the_transfer_is_left(deployed: Any, hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        assert not list(host.path("/run").glob("ddtoolkit-*"))
        units = host.root(["systemctl", "list-units", "--plain", "--no-legend", "ddtoolkit-seed*"]).stdout
        assert not units
        assert not [path for path in host.path(MODELS).iterdir() if path.name.endswith(".part")]


def test_a_second_deploy_asks_nobody(
    deployed: Any, ddtoolkit: Command, sets: list[str], publisher: HttpsPublisher
) -> None:
    publisher.forget()
    done = ddtoolkit("deploy", "profile", NAME, *sets, "--yes")
    assert done.stderr.count("nothing to do") == 2
    assert publisher.requests() == []


def test_what_serves_cannot_be_removed(deployed: Any, ddtoolkit: Command) -> None:
    done = ddtoolkit("models", "rm", "target@v1", "--force", "--yes", status=2)
    assert "target@v1 is needed by the current release" in done.stderr


def test_a_transfer_goes_on_without_its_connection(
    ddtoolkit: Command, hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    done: list[subprocess.CompletedProcess[str]] = []
    words = ("models", "add", large(publisher), "--revision", "v1", "--rate", "4MB", "-v")
    thread = threading.Thread(target=lambda: done.append(ddtoolkit(*words, host=hosts[0].name)))
    thread.start()
    unit = wait_for(lambda: transfer_unit(hosts[0]))
    pid = hosts[0].root(["systemctl", "show", "-P", "MainPID", unit]).stdout
    hosts[0].break_connections()
    time.sleep(1.0)
    assert hosts[0].root(["systemctl", "show", "-P", "MainPID", unit]).stdout == pid
    thread.join(120)
    assert "connecting again" in done[0].stderr
    assert "large@v1 is complete at" in done[0].stderr
    assert " left" in done[0].stderr


def test_a_peer_can_be_named_also_one_that_is_not_worked_on(
    ddtoolkit: Command, hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    ddtoolkit("models", "add", large(publisher), "--revision", "v5", host=hosts[0].name)
    publisher.forget()
    source = f"peer://{hosts[0].name}/large@v5"
    done = ddtoolkit("models", "add", source, host=hosts[1].name)
    assert f"{hosts[1].name}: large@v5 is complete at" in done.stderr
    assert publisher.requests() == []
    marker = json.loads(hosts[1].path(f"{MODELS}/large@v5/.weights.json").read_text())
    assert marker["source"] == f"{large(publisher)} at v5"
    absent = ddtoolkit("models", "add", f"peer://{hosts[0].name}/absent@v1", host=hosts[1].name, status=1)
    assert f"{MODELS}/absent@v1 cannot be handed out: it is not there" in absent.stderr


def test_a_killed_transfer_is_gone_on_with(
    ddtoolkit: Command, hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    failed: list[subprocess.CompletedProcess[str]] = []
    words = ("models", "add", large(publisher), "--revision", "v2", "--files", "1")
    thread = threading.Thread(
        target=lambda: failed.append(ddtoolkit(*words, "--rate", "4MB", host=hosts[1].name, status=1))
    )
    thread.start()
    unit = wait_for(lambda: transfer_unit(hosts[1]))
    part = hosts[1].path(f"{MODELS}/large@v2.part")
    wait_for(lambda: (part / ".arrived").exists() and "model-" in (part / ".arrived").read_text())
    hosts[1].root(["systemctl", "kill", "--signal=KILL", unit])
    thread.join(60)
    assert "ended without a result" in failed[0].stderr
    publisher.forget()
    ddtoolkit(*words, host=hosts[1].name)
    fetched = [
        path for _, method, path, _ in publisher.requests() if method == "GET" and "safetensors" in path
    ]
    assert len(fetched) == 2
    assert hosts[1].path(f"{MODELS}/large@v2/.weights.json").is_file()


def test_what_does_not_fit_is_refused_before_anything_is_copied(
    ddtoolkit: Command, hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    words = ("models", "add", large(publisher), "--revision", "v3")
    hosts[1].fill_disk(leave=20 << 20)
    try:
        done = ddtoolkit(*words, host=hosts[1].name, status=1)
    finally:
        hosts[1].empty_disk()
    assert "not enough disk below /var/lib/ddtoolkit/models: large@v3 36.0 MB" in done.stderr
    assert not hosts[1].path(f"{MODELS}/large@v3.part").exists()


def test_a_corrupt_shard_is_found_and_fetched_from_the_peer_that_has_it(
    deployed: Any, ddtoolkit: Command, sets: list[str], hosts: tuple[Host, Host], publisher: HttpsPublisher
) -> None:
    shard = hosts[0].path(f"{MODELS}/target@v1/model.safetensors")
    status = shard.stat()
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"corrupt")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "nothing to do" in ddtoolkit("plan", NAME, *sets, host=hosts[0].name).stdout
    done = ddtoolkit("models", "verify", "target@v1", status=1)
    assert f"{hosts[0].name}: target@v1: model.safetensors is corrupt" in done.stderr
    assert f"{hosts[1].name}: target@v1: every file is as it came" in done.stderr
    publisher.forget()
    ddtoolkit("models", "add", f"{publisher.url}folder/target/", "--revision", "v1")
    assert not [
        path for _, method, path, _ in publisher.requests() if method == "GET" and "safetensors" in path
    ]
    ddtoolkit("models", "verify", "target@v1")


def test_the_playbook_brings_the_same(
    deployed: Any, ddtoolkit: Command, sets: list[str], inventory: Path, hosts: tuple[Host, Host]
) -> None:
    settings = inventory.parent / "settings"
    subprocess.run(
        [PROGRAM, "render", NAME, "--format", "ansible", "--out", settings, *sets], check=True, timeout=60
    )
    hosts[1].root(["mv", f"{MODELS}/drafter@v1", "/root/drafter"])
    words = [PLAYBOOK, "-i", inventory, ROOT / "playbooks" / "weights.yml", "--limit", hosts[1].name]
    words += ["-e", f"ddtoolkit_settings_file={settings}/settings.json"]

    def run(*more: str) -> str:
        done = subprocess.run(
            [*words, *more],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | {"ANSIBLE_PIPELINING": "True"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-2]

    assert "changed=1" in run("--check")
    assert "changed=1" in run()
    assert "changed=0" in run()
    assert hosts[1].path(f"{MODELS}/drafter@v1/.weights.json").is_file()
