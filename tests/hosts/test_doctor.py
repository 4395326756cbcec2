"""The doctor over real SSH, on a real host whose programs print what was recorded on hosts with GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor import on_host, profiles
from tests.doctor.recorded import Site, addresses, b300, pcie, ports
from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host

pytestmark = pytest.mark.timeout(300)

PROGRAM = Path(sys.executable).parent / "ddtoolkit"
ROOT = Path(__file__).parents[2]
PCIE, B300 = profiles.PCIE, profiles.B300
# What a test host cannot have: the disk, and a Python of Ubuntu 24.04.
SETS = ("--set", "host.min_free_disk=512MiB", "--set", "host.python_version=3.11")
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.105\n"

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def host(make_host: MakeHost) -> Host:
    made = make_host("bookworm", name="ct200", disk="1G")
    on_host.install(made)
    on_host.become(made, pcie())
    return made


@pytest.fixture(scope="module")
def inventory(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "inventory.yaml"
    return write_inventory(path, [host], {host.name: {"ddtoolkit_profiles": [PCIE, B300]}})


@pytest.fixture(scope="module")
def doctor(inventory: Path) -> Doctor:
    """Runs the command; gives the findings by check, or all that it said."""

    def run(*arguments: str, status: int = 0) -> dict[str, Any]:
        done = ended(*arguments, inventory=inventory)
        assert done.returncode == status, done.stdout + done.stderr
        (report,) = json.loads(done.stdout)["hosts"]["ct200"]["result"]
        found: dict[str, Any] = {}
        for item in report["findings"]:
            found.setdefault(item["level"], {})[item["check"]] = item
        return found

    return run


def ended(*arguments: str, inventory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "doctor", *arguments, *SETS, "-i", inventory, "--json"],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize(("name", "machine"), [(PCIE, pcie()), (B300, b300())], ids=[PCIE, B300])
def test_a_healthy_host_passes(name: str, machine: Site, host: Host, doctor: Doctor) -> None:
    on_host.become(host, machine)
    found = doctor(name)
    assert "fail" not in found
    # A container does not grant infinite memlock, and no hub is reached from there.
    assert set(found["warn"]) <= {"limits", "disk"}
    assert "https://huggingface.co" in found["warn"]["disk"]["seen"]
    assert found["pass"]["gpu-count"]["seen"] == "8 GPUs"
    assert found["pass"]["sandbox"]["seen"].startswith("8 GPUs are seen inside, as nobody (ddtoolkit is made")
    assert {"acs", "iommu", "p2p", "topology", "numa", "compilers", "ram", "port", "os", "python"} <= set(
        found["pass"]
    )


FAULTS = {
    "acs": (PCIE, replace(pcie(), acs=ports()), "acs", "CmpltRedir and ReqRedir on 0000:15:01.0"),
    "iommu": (PCIE, replace(pcie(), iommu="DMA", cmdline="ro intel_iommu=on"), "iommu",
        "type DMA (intel_iommu=on"),
    "missing": (PCIE, pcie().without(3), "gpu-count", f"7 GPUs; the driver does not have {addresses()[3]}"),
    "memory": (PCIE, pcie().with_cards(total_mib=49140), "gpu-memory", "48.0 GiB"),
    "fabric": (B300, b300().with_cards(fabric=("In Progress", "N/A")), "fabric", "'In Progress' on all GPUs"),
    "mismatch": (PCIE, replace(pcie(), broken=(18, MISMATCH), library="580.105.08"), "driver",
        "kernel module 580.95.05, library 580.105.08"),
    "nouveau": (PCIE, replace(pcie(), modules=("nvidia", "nouveau"), nouveau=(addresses()[1],)), "nouveau",
        f"module nouveau is loaded and has {addresses()[1]}"),
    "mig": (B300, b300().with_card(0, mig="Enabled"), "mig", "MIG is on: GPU 0"),
    "pending": (B300, b300().with_card(2, repair_pending="Yes"), "ecc",
        "GPU 2 (0000:38:00.0): a faulty memory row"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, host: Host, doctor: Doctor) -> None:
    profile, machine, check, words = FAULTS[name]
    on_host.become(host, machine)
    failed = doctor(profile, status=1)["fail"]
    # Without an answer of the driver the sandbox shows none either.
    assert set(failed) - ({"sandbox"} if machine.broken else set()) == {check}
    assert words in failed[check]["seen"]
    assert failed[check]["expected"]
    assert failed[check]["fix"]


def test_an_idle_link_at_generation_1_passes(host: Host, doctor: Doctor) -> None:
    on_host.become(host, pcie().with_cards(generation=1, state="P8"))
    assert doctor(PCIE)["pass"]["pcie-link"]["seen"] == "generation 5 x16, at 1 while idle"


@pytest.fixture
def stranger(host: Host) -> Iterator[int]:
    """A process that the driver knows on a GPU."""
    host.root(["systemd-run", "--unit=stranger", "-p", "User=deploy", "--quiet", "sleep", "600"])
    yield pid_of(host, "stranger")
    host.root(["systemctl", "stop", "stranger"])


def pid_of(host: Host, unit: str) -> int:
    shown = host.root(["systemctl", "show", "-p", "MainPID", "--value", unit])
    return int(shown.stdout)


def test_a_foreign_process_is_named_with_its_user(host: Host, doctor: Doctor, stranger: int) -> None:
    taken = (stranger, "C", "/usr/bin/python3", 81234)
    on_host.become(host, pcie().with_card(2, processes=(taken,), used_mib=81240))
    seen = doctor(PCIE, status=1)["fail"]["gpu-processes"]["seen"]
    assert seen.startswith(f"process {stranger} (/usr/bin/python3) of deploy is on GPU 2, 81234 MiB")
    assert "stranger.service" in seen


def test_the_services_own_process_and_port_are_no_strangers(host: Host, doctor: Doctor) -> None:
    serve = ["/usr/bin/python3", "-m", "http.server", "30000", "--bind", "127.0.0.1"]
    host.root(["systemd-run", f"--unit=ddtoolkit-{PCIE}", "--quiet", *serve])
    try:
        own = (pid_of(host, f"ddtoolkit-{PCIE}"), "C", "python3", 90000)
        on_host.become(host, pcie().with_cards(processes=(own,), used_mib=90010))
        wait_for_port(host)
        found = doctor(PCIE)
        assert found["pass"]["gpu-processes"]["seen"] == "the service's own alone"
        assert found["pass"]["port"]["seen"] == "127.0.0.1:30000 is the service's own"
    finally:
        host.root(["systemctl", "stop", f"ddtoolkit-{PCIE}"])


def test_a_port_of_another_is_named(host: Host, doctor: Doctor) -> None:
    on_host.become(host, pcie())
    serve = ["/usr/bin/python3", "-m", "http.server", "30000", "--bind", "127.0.0.1"]
    host.root(["systemd-run", "--unit=stranger", "--quiet", *serve])
    try:
        pid = pid_of(host, "stranger")
        wait_for_port(host)
        failed = doctor(PCIE, status=1)["fail"]
        assert set(failed) == {"port"}
        assert f"in use by process {pid} (python3)" in failed["port"]["seen"]
    finally:
        host.root(["systemctl", "stop", "stranger"])


def wait_for_port(host: Host) -> None:
    for _ in range(100):
        if ":30000" in host.root(["ss", "-Hltn"]).stdout:
            return
        time.sleep(0.1)
    raise AssertionError("nothing listens on port 30000")


def test_a_short_disk_is_found_before_anything_is_copied(host: Host, doctor: Doctor) -> None:
    on_host.become(host, pcie())
    host.fill_disk(leave=200 << 20)
    try:
        failed = doctor(PCIE, status=1)["fail"]
        assert set(failed) == {"disk"}
        assert "MiB free at /opt/ddtoolkit/services" in failed["disk"]["seen"]
        assert failed["disk"]["expected"] == "512 MiB (host.min_free_disk)"
    finally:
        host.empty_disk()


def test_a_device_that_the_service_may_not_open_is_found_inside_its_sandbox(
    host: Host, doctor: Doctor
) -> None:
    on_host.become(host, pcie())
    host.root(["chmod", "600", "/dev/nvidia-uvm"])
    failed = doctor(PCIE, status=1)["fail"]
    assert set(failed) == {"sandbox"}
    assert "/dev/nvidia-uvm: Permission denied inside, as nobody" in failed["sandbox"]["seen"]


def test_a_program_that_hangs_does_not_hang_the_doctor(host: Host, doctor: Doctor) -> None:
    on_host.become(host, pcie())
    smi = host.path("/usr/local/bin/nvidia-smi")
    kept = smi.read_text(encoding="utf-8")
    smi.write_text("#!/bin/sh\nsleep 300\n", encoding="utf-8")
    try:
        begun = time.monotonic()
        failed = doctor(PCIE, status=1)["fail"]
        assert time.monotonic() - begun < 60
        assert failed["driver"]["seen"] == "nvidia-smi does not end"
        for _ in range(50):  # what was killed is there for a moment more
            left = host.root(["pgrep", "-fa", "sleep 300"], check=False).stdout
            if left == "":
                break
            time.sleep(0.2)
        assert left == ""
    finally:
        smi.write_text(kept, encoding="utf-8")


def test_nothing_is_left_on_the_host(host: Host, doctor: Doctor) -> None:
    on_host.become(host, pcie())
    before = host.root(
        ["sh", "-c", "ls -A /opt/ddtoolkit /var/cache /var/lib /tmp /run/systemd/transient"]
    ).stdout
    doctor(PCIE)
    after = host.root(
        ["sh", "-c", "ls -A /opt/ddtoolkit /var/cache /var/lib /tmp /run/systemd/transient"]
    ).stdout
    assert after == before
    assert "doctor" not in host.root(["systemctl", "list-units", "--all", "--plain"]).stdout


def test_both_profiles_of_a_host_are_looked_at_without_a_name(host: Host, inventory: Path) -> None:
    on_host.become(host, b300())
    done = ended(inventory=inventory)
    assert done.returncode == 1, done.stderr
    reports = json.loads(done.stdout)["hosts"]["ct200"]["result"]
    assert [report["profile"] for report in reports] == [PCIE, B300]
    failed = [item["check"] for item in reports[0]["findings"] if item["level"] == "fail"]
    assert failed == ["gpu-model"]
    assert reports[1]["ok"]


def test_what_cannot_run_is_refused_before_the_host_is_asked(inventory: Path) -> None:
    done = ended(PCIE, "--set", "parallelism.pp=2", "--set", "hardware.count=16", inventory=inventory)
    assert done.returncode == 2
    assert "parallelism.pp" in done.stderr
