"""Making hosts with GPUs ready, on hosts that really reboot: by the command and by ansible-playbook alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.hosts import apt
from tests.hosts import gpu_packages as gpus
from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host

pytestmark = pytest.mark.timeout(420)

PCIE, NVLINK, SERVED = "rtx-pro-6000-pcie-8x", "h200-nvlink", "systemd-cpu"
SCRIPTS = Path(sys.executable).parent
PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
DRIVER = {
    PCIE: "{branch: 580, kernel_arguments: [iommu=pt], acs_off: true, "
    "module_options: [nvidia_uvm uvm_disable_hmm=1]}",
    NVLINK: "{branch: 580}",
}

# The hosts have drivers and boots of their own making, but no GPUs, compilers or space: the doctor says so.
LACKING = (
    "driver", "gpu-count", "gpu-model", "gpu-memory", "sandbox", "compilers", "os", "python", "disk", "ram",
    "shared-memory", "port", "time", "fabric", "cache", "limits", "acs", "persistence",
)  # fmt: skip
IGNORED = [word for name in LACKING for word in ("--ignore-check", name)]

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpus.build(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def hosts(repository: Path, make_host: MakeHost) -> dict[str, Host]:
    bind = f"{repository}:{apt.REPOSITORY}"
    made = {
        name: make_host(release, name=name, binds=[bind])
        for name, release in (("gpu1", "bookworm"), ("gpu2", "trixie"))
    }
    for host in made.values():
        apt.forget_sources(host)
    return made


@pytest.fixture(scope="module")
def inventory(hosts: dict[str, Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    variables = {name: {"ddtoolkit_profiles": [PCIE, NVLINK]} for name in hosts}
    return write_inventory(tmp_path_factory.mktemp("gpu") / "inventory.yaml", hosts.values(), variables)


@pytest.fixture(scope="module")
def prepare(inventory: Path) -> Command:
    def run(
        name: str,
        *arguments: str,
        limit: str = "gpu1",
        ignored: Sequence[str] = IGNORED,
        status: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        command = [SCRIPTS / "ddtoolkit", "hosts", "prepare", name, "-i", inventory, "--limit", limit]
        return ended([*command, "--set", f"hardware.driver={DRIVER[name]}", *ignored, *arguments], status)

    return run


def ended(command: list[object], status: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ANSIBLE_PIPELINING": "True"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def version_of(host: Host, package: str) -> str:
    shape = "--showformat=${db:Status-Status} ${Version}"
    shown = host.root(["dpkg-query", "--show", shape, package], check=False).stdout
    return shown.removeprefix("installed ") if shown.startswith("installed ") else ""


def boot_of(host: Host) -> str:
    return host.root(["cat", "/proc/sys/kernel/random/boot_id"]).stdout


def held(host: Host) -> set[str]:
    return set(host.root(["apt-mark", "showhold"]).stdout.split())


def test_without_a_source_it_says_what_is_missing_and_adds_none(
    prepare: Command, hosts: dict[str, Host]
) -> None:
    shown = prepare(PCIE, "--check").stdout
    assert "gpu1: no configured apt source has a driver of branch 580, 580.65.06 or newer" in shown
    said = prepare(PCIE, "--yes", status=1).stderr
    assert "no configured apt source has cuda-toolkit-13-0" in said
    assert "sources are never added unasked" in said
    assert hosts["gpu1"].root(["ls", "/etc/apt/sources.list.d"]).stdout == ""
    assert not hosts["gpu1"].path("/etc/modprobe.d/ddtoolkit-gpu.conf").exists()


def test_after_a_failure_no_other_host_is_begun(prepare: Command, hosts: dict[str, Host]) -> None:
    apt.add_source(hosts["gpu2"])
    hosts["gpu2"].root(["apt-get", "-q", "update"])
    shown = json.loads(prepare(PCIE, "--yes", "--json", limit="gpu1,gpu2", status=1).stdout)["hosts"]
    assert "sources are never added unasked" in shown["gpu1"]["error"]
    assert shown["gpu2"]["skipped"] == "not begun, since gpu1 failed"
    assert version_of(hosts["gpu2"], "nvidia-driver-580-server-open") == ""


def test_what_needs_no_reboot_is_done_and_the_rest_is_pending(
    prepare: Command, hosts: dict[str, Host]
) -> None:
    host = hosts["gpu1"]
    apt.add_source(host)
    apt.apt_install(host, "grub2-common")
    gpus.boot_with_gpus(host)
    host.reboot()
    before = boot_of(host)
    said = prepare(PCIE, "--yes", status=7).stderr
    assert "driver: install nvidia-driver-580-server-open 580.95.05-0ubuntu1" in said
    assert "gpu1: pending: iommu=pt is not on the kernel's command line" in said
    assert "gpu1: pending: nouveau is loaded; it is blacklisted from the next boot on" in said
    words = "hosts prepare rtx-pro-6000-pcie-8x --set 'hardware.driver={branch: 580, "
    assert f"next: ddtoolkit {words}" in said
    assert re.search(r" --allow-reboot -i \S+/inventory\.yaml --limit gpu1\n", said)
    assert boot_of(host) == before
    assert version_of(host, "nvidia-driver-580-server-open") == "580.95.05-0ubuntu1"
    assert {"nvidia-driver-580-server-open", "libnvidia-compute-580-server"} <= held(host)
    assert "iommu=pt" in host.path("/boot/grub/grub.cfg").read_text()
    assert f"-s {gpus.BRIDGE} ECAP_ACS+0x6.w=0000\n" == host.path("/var/log/setpci").read_text()


def test_a_reboot_that_is_allowed_finishes_it(prepare: Command, hosts: dict[str, Host]) -> None:
    host = hosts["gpu1"]
    before = boot_of(host)
    # The doctor has the last word: the test's nvidia-smi knows no GPUs.
    strict = [word for word in IGNORED if word != "driver"]
    del strict[0]
    said = prepare(PCIE, "--yes", "--allow-reboot", ignored=strict, status=1).stderr
    assert "gpu1: it was made ready, but the doctor finds:\nerror: gpu1: driver: " in said
    assert boot_of(host) != before
    assert "iommu=pt" in host.root(["cat", "/proc/cmdline"]).stdout
    assert host.root(["nvidia-smi", "--query-gpu=persistence_mode"]).stdout == "Enabled\n"
    assert host.root(["test", "-e", "/run/acs-is-off"], check=False).returncode == 0
    reached = host.root(
        ["systemctl", "show", "-P", "ActiveEnterTimestampMonotonic", "basic.target", "gpu-acs-off"]
    )
    basic, acs = (int(line) for line in reached.stdout.split())
    assert acs <= basic


def test_a_second_run_changes_nothing_and_does_not_reboot(
    prepare: Command, hosts: dict[str, Host], inventory: Path
) -> None:
    host = hosts["gpu1"]
    before = boot_of(host)
    assert "gpu1: nothing to do" in prepare(PCIE, "--yes", "--allow-reboot").stderr
    settings = inventory.parent / "settings"
    render = [SCRIPTS / "ddtoolkit", "render", PCIE, "--format", "ansible", "--out", settings]
    ended([*render, "--set", f"hardware.driver={DRIVER[PCIE]}"], 0)
    playbook = [SCRIPTS / "ansible-playbook", "-i", inventory, PLAYBOOKS / "gpu.yml", "--limit", "gpu1"]
    playbook += [
        "-e",
        f"ddtoolkit_settings_file={settings}/settings.json",
        "-e",
        "ddtoolkit_allow_reboot=true",
    ]
    for more in ([], ["--check"]):
        shown = ended([*playbook, *more], 0).stdout
        assert re.search(r"^gpu1 .* changed=0 ", shown, re.MULTILINE), shown
    assert boot_of(host) == before
    assert host.path("/var/log/update-grub").read_text() == "ran\n"


def test_a_fabric_manager_of_another_version_is_replaced_without_a_reboot(
    prepare: Command, hosts: dict[str, Host]
) -> None:
    host = hosts["gpu2"]
    apt.add_source(host)
    apt.apt_install(host, "nvidia-driver-580-server-open", f"nvidia-fabricmanager-580={gpus.OLDEST}-0ubuntu1")
    gpus.boot_with_gpus(host, nouveau=False)
    host.reboot()
    before = boot_of(host)
    said = prepare(NVLINK, "--yes", limit="gpu2").stderr
    assert "fabric manager: nvidia-fabricmanager-580 580.65.06-0ubuntu1 -> 580.95.05-0ubuntu1" in said
    assert boot_of(host) == before
    assert version_of(host, "nvidia-fabricmanager-580") == "580.95.05-0ubuntu1"
    assert host.root(["systemctl", "is-active", "nvidia-fabricmanager"]).stdout == "active\n"
    assert "nvidia-fabricmanager-580" in held(host)
    assert not host.path("/etc/systemd/system/gpu-acs-off.service").exists()


class Balancer:
    """A load balancer as the inventory's hooks see it, and the command on the host that stands behind it."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.log = host, folder / "log"
        self.log.touch()

        def hook(word: str) -> list[str]:
            fails = f"import os; os.path.exists({str(self.broken(word))!r}) and exit('no balancer')"
            return [sys.executable, "-c", f"{fails}; open({str(self.log)!r}, 'a').write('{word} ')"]

        hooks = {"ddtoolkit_drain": hook("drain"), "ddtoolkit_undrain": hook("undrain")}
        variables = {host.name: {"ddtoolkit_profiles": [PCIE, SERVED], **hooks}}
        self.inventory = write_inventory(folder / "inventory.yaml", [host], variables)
        prepare = ["hosts", "prepare", PCIE, "--set", f"hardware.driver={DRIVER[PCIE]}"]
        self.prepare = [SCRIPTS / "ddtoolkit", *prepare, "-i", self.inventory, "--yes", *IGNORED]

    def broken(self, word: str) -> Path:
        """A file that makes the hook of that word fail."""
        return self.log.with_name(f"{word}-fails")

    def told(self) -> str:
        return self.log.read_text()

    def status(self) -> dict[str, object]:
        (found,) = json.loads(self.host.root(["ddtoolkit", "status", "--json"]).stdout)
        return found


@pytest.fixture(scope="module")
def balancer(repository: Path, make_host: MakeHost, tmp_path_factory: pytest.TempPathFactory) -> Balancer:
    """A host that serves; the module of an older driver branch is loaded there."""
    bind = f"{repository}:{apt.REPOSITORY}"
    host = make_host("bookworm", name="gpu3", binds=[bind], engine=True, disk="4G")
    apt.forget_sources(host)
    apt.add_source(host)
    apt.apt_install(host, "grub2-common", "nvidia-driver-570-server-open", "nvidia-fabricmanager-570")
    gpus.boot_with_gpus(host, nouveau=False)
    host.reboot()
    made = Balancer(host, tmp_path_factory.mktemp("balancer"))
    deploy = ["deploy", "profile", SERVED, "--set", f"host.python={sys.executable}"]
    ended([SCRIPTS / "ddtoolkit", *deploy, "-i", made.inventory, "--yes"], 0)
    assert made.status()["healthy"]
    made.log.write_text("")
    return made


def test_a_driver_is_not_replaced_under_what_serves(balancer: Balancer) -> None:
    before, boot = balancer.status()["pid"], boot_of(balancer.host)
    said = ended(balancer.prepare, 7).stderr
    assert "gpu3: pending: driver 580.95.05 replaces 570.86.15, which is loaded" in said
    assert version_of(balancer.host, "nvidia-driver-580-server-open") == ""
    assert version_of(balancer.host, "nvidia-driver-570-server-open") == "570.86.15-0ubuntu1"
    assert (balancer.status()["pid"], boot_of(balancer.host)) == (before, boot)
    assert balancer.told() == ""


def by_playbook(balancer: Balancer, status: int) -> str:
    """A run of the playbook alone that may reboot; what it printed."""
    settings = balancer.inventory.parent / "settings"
    if not settings.exists():
        render = [SCRIPTS / "ddtoolkit", "render", PCIE, "--format", "ansible", "--out", settings]
        ended([*render, "--set", f"hardware.driver={DRIVER[PCIE]}"], 0)
    variables = {"ddtoolkit_settings_file": f"{settings}/settings.json", "ddtoolkit_allow_reboot": True}
    playbook = [SCRIPTS / "ansible-playbook", "-i", balancer.inventory, PLAYBOOKS / "gpu.yml"]
    return ended([*playbook, "-e", json.dumps(variables)], status).stdout


def test_what_apt_cannot_do_drains_nobody(balancer: Balancer, repository: Path) -> None:
    before, driver = balancer.status()["pid"], f"nvidia-driver-580-server-open_{gpus.NEW}-0ubuntu1_all.deb"
    (repository / driver).rename(repository / "away")
    try:
        said = by_playbook(balancer, 2)
    finally:
        (repository / "away").rename(repository / driver)
    assert re.search(rf"apt cannot do it: [^\"]*{re.escape(driver)}[^\"]*; nothing was installed", said), said
    assert balancer.told() == ""
    assert balancer.status()["pid"] == before


def test_what_fails_while_the_server_goes_on_serving_puts_the_host_back(balancer: Balancer) -> None:
    host, before = balancer.host, balancer.status()["pid"]
    host.root(["dpkg", "--unpack", f"{apt.REPOSITORY}/ninja-build_1.0-1_all.deb"])
    failing = host.path("/etc/apt/apt.conf.d/99failing")
    failing.write_text('DPkg::Pre-Invoke {"exit 3";};\n')
    try:
        said = by_playbook(balancer, 2)
    finally:
        failing.unlink()
    assert re.search(r"Install packages: .*; what served still serves, so the host was put back", said), said
    assert balancer.told() == "drain undrain "
    assert balancer.status()["pid"] == before
    assert version_of(host, "ninja-build") == "1.0-1"  # it was finished before the host was drained
    assert not host.path("/var/lib/ddtoolkit/gpu-host.json").exists()
    balancer.log.write_text("")


def test_a_drain_hook_that_fails_changes_nothing_and_says_why(balancer: Balancer) -> None:
    before = balancer.status()["pid"]
    balancer.broken("drain").touch()
    try:
        said = by_playbook(balancer, 2)
    finally:
        balancer.broken("drain").unlink()
    assert re.search(
        r"Take it out of the load balancer: [^\"]*no balancer; what served still serves", said
    ), said
    assert balancer.told() == "undrain "
    assert balancer.status()["pid"] == before
    assert not balancer.host.path("/var/lib/ddtoolkit/gpu-host.json").exists()
    balancer.log.write_text("")


def test_a_change_of_branch_drains_reboots_and_goes_on_after_its_controller_was_killed(
    balancer: Balancer,
) -> None:
    boot = boot_of(balancer.host)
    command = [*balancer.prepare, "--allow-reboot"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as controller:
        end = time.monotonic() + 200
        while balancer.told() != "drain ":
            assert controller.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        os.killpg(controller.pid, signal.SIGKILL)
    # As after a power cut: a file that was just written has its name and no content.
    balancer.host.path("/var/lib/ddtoolkit/gpu-host.json").write_text("")
    balancer.broken("undrain").touch()
    said = ended(command, 1).stderr
    assert "gpu3: go on with a run that was cut off: the host is drained" in said
    assert re.search(
        r"serves, but stays drained: ddtoolkit_undrain: [^\n]*no balancer; mend the command", said
    ), said
    balancer.broken("undrain").unlink()
    assert "gpu3: ready" in ended(command, 0).stderr
    assert boot_of(balancer.host) != boot
    assert balancer.host.root(["cat", "/sys/module/nvidia/version"]).stdout == f"{gpus.NEW}\n"
    assert version_of(balancer.host, "nvidia-driver-570-server-open") == ""
    assert balancer.status()["healthy"]
    assert balancer.told() == "drain drain drain undrain "
    assert not balancer.host.path("/var/lib/ddtoolkit/gpu-host.json").exists()
