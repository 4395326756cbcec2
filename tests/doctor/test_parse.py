"""The parsers on recorded outputs; outputs/SOURCES.toml says where each comes from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.doctor import recorded
from toolkit.doctor.parse import host
from toolkit.doctor.parse.pci import bridges_above, parse_lspci
from toolkit.doctor.parse.smi import GpuProcess, Link, parse_smi
from toolkit.doctor.parse.topology import distance, parse_matrix, parse_nvlink

OUTPUTS = Path(__file__).with_name("outputs")


def output(name: str) -> str:
    return (OUTPUTS / name).read_text(encoding="utf-8")


def test_every_output_has_a_source() -> None:
    sources = tomllib.loads(output("SOURCES.toml"))
    assert set(sources) == {path.name for path in OUTPUTS.iterdir()} - {"SOURCES.toml"}
    for text in sources.values():
        assert text.startswith(("recorded on ", "public: https://", "synthetic"))


def test_an_h200_as_its_driver_tells_it() -> None:
    smi = parse_smi(output("h200-smi.xml"))
    assert smi is not None
    assert (smi.driver, smi.cuda, len(smi.gpus)) == ("580.159.04", "13.0", 1)
    gpu = smi.gpus[0]
    assert (gpu.name, gpu.address, gpu.memory_mib, gpu.used_mib) == ("NVIDIA H200", "0000:00:06.0", 143771, 0)
    assert gpu.link == Link(5, 5, 5, 16, 16)
    assert (gpu.persistence, gpu.mig, gpu.ecc, gpu.ecc_pending) == (True, False, True, True)
    assert (gpu.uncorrectable, gpu.uncorrectable_ever) == (0, 0)
    assert not gpu.repair_pending
    assert not gpu.repair_failed
    assert (gpu.performance_state, gpu.utilization) == ("P0", 0)
    assert gpu.recovery is None
    assert gpu.fabric_state is None  # one GPU handed to a virtual machine is in no fabric
    assert gpu.processes == ()


def test_faults_as_the_driver_tells_them() -> None:
    site = recorded.b300().with_card(
        1, uncorrectable=3, uncorrectable_ever=5, repair_pending="Yes", mig="Enabled", ecc="Disabled",
        fabric=("In Progress", "N/A"),
        processes=((7, "C", "/opt/x y", 512), (8, "G", "/usr/lib/xorg/Xorg", 4)),
        persistence="Disabled", recovery="Reset",
    )  # fmt: skip
    smi = parse_smi(recorded.smi(site))
    assert smi is not None
    assert len(smi.gpus) == 8
    gpu = smi.gpus[1]
    assert (gpu.uncorrectable, gpu.uncorrectable_ever, gpu.repair_pending) == (3, 5, True)
    assert (gpu.mig, gpu.ecc, gpu.persistence, gpu.recovery) == (True, False, False, "Reset")
    assert (gpu.fabric_state, gpu.fabric_status) == ("In Progress", None)
    assert gpu.processes == (GpuProcess(7, "C", "/opt/x y", 512), GpuProcess(8, "G", "/usr/lib/xorg/Xorg", 4))
    assert smi.gpus[0].fabric_state == "Completed"


@pytest.mark.parametrize("text", ["", "No devices were found\n", "<html></html>", "<nvidia_smi_log>"])
def test_what_is_no_account_of_gpus_is_none(text: str) -> None:
    assert parse_smi(text) is None


def test_a_driver_that_tells_little_is_read_all_the_same() -> None:
    smi = parse_smi('<nvidia_smi_log><gpu id="00000000:01:00.0"></gpu></nvidia_smi_log>')
    assert smi is not None
    assert smi.driver is None
    assert smi.gpus[0].address == "0000:01:00.0"
    assert smi.gpus[0].memory_mib is None
    assert smi.gpus[0].mig is None


def test_a_topology_over_pcie() -> None:
    matrix = parse_matrix(output("five-4090-topo-m.txt"))
    assert matrix.between([1, 2, 3]) == {(1, 2): "PHB", (1, 3): "NODE", (2, 3): "NODE"}
    assert matrix.pairs[0, 4] == matrix.pairs[4, 0] == "SYS"
    assert matrix.numa == {0: "1", 1: "0", 2: "0", 3: "0", 4: "0"}


def test_a_topology_with_one_gpu_off_the_nvlinks_and_with_network_cards() -> None:
    matrix = parse_matrix(output("eight-b200-topo-m.txt"))
    pairs = matrix.between(list(range(8)))
    assert len(pairs) == 28
    assert {pair for pair, word in pairs.items() if not word.startswith("NV")} == {
        (0, 2), (1, 2), (2, 3), (2, 4), (2, 5), (2, 6), (2, 7),
    }  # fmt: skip
    assert matrix.numa[7] == "1"


def test_a_topology_that_is_underlined() -> None:
    assert parse_matrix(output("h200-topo-m.txt")).numa == {0: "0"}
    assert parse_matrix(output("h200-p2p.txt")).pairs == {}


def test_distances_are_ordered() -> None:
    words = ["NV18", "PIX", "PXB", "PHB", "NODE", "SYS", "what"]
    assert sorted(words, key=distance) == words
    assert len({distance(word) for word in words}) == len(words)


def test_peer_to_peer() -> None:
    allowed = parse_matrix(output("five-5060-p2p.txt"))
    assert set(allowed.between([0, 1, 2, 3, 4]).values()) == {"OK"}
    assert len(allowed.pairs) == 20
    assert parse_matrix(output("two-5090-p2p.txt")).between([0, 1]) == {(0, 1): "GNS"}


def test_nvlinks() -> None:
    assert parse_nvlink(output("v100-nvlink.txt")) == {3: [25.781, 25.781, 25.781, None, 25.781, None]}
    assert parse_nvlink(output("gb200-nvlink.txt")) == {0: [53.125] * 18, 1: [53.125] * 18}
    assert parse_nvlink("NVML: Unable to retrieve\n") == {}


def test_bridges_above_a_gpu() -> None:
    devices = parse_lspci(output("starship-lspci.txt"))
    assert [device.address for device in devices] == [
        "0000:40:00.0", "0000:40:01.1", "0000:41:00.0", "0000:42:00.0", "0000:60:03.1",
    ]  # fmt: skip
    port, switch = bridges_above(devices, "0000:42:00.0")
    assert (port.address, port.redirects, port.width, port.max_width) == (
        "0000:40:01.1", ["CmpltRedir", "ReqRedir"], 8, 16,
    )  # fmt: skip
    assert port.max_speed == 16.0
    assert (switch.address, switch.redirects) == ("0000:41:00.0", [])
    (denied,) = bridges_above(devices, "0000:61:00.0")
    assert denied.acs is None
    assert bridges_above(devices, "0001:42:00.0") == []
    assert parse_lspci("lspci: Unable to load libkmod resources\n") == ()


def test_versions() -> None:
    assert host.module_version(output("h200-version.txt")) == "580.159.04"
    assert host.module_version(output("ubuntu-version.txt")) == "580.173.02"
    assert host.module_version(None) is None
    assert host.nvml_version(output("mismatch.txt")) == "580.178"
    assert host.fabric_manager_version(output("fabric-manager.txt")) == "580.159.03"
    names = ["libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05", "libcuda.so.570.86.15", "libcuda.so.1"]
    assert host.library_versions(names) == ["570.86.15", "580.95.05"]
    assert host.numbers("580.95.05-0ubuntu1") == (580, 95)
    assert host.numbers("580.95.05") < host.numbers("580.105.08")


def test_the_distribution() -> None:
    assert host.properties(output("fabric-unit.txt"))["Result"] == "exit-code"
    packages = host.driver_packages(output("ubuntu-packages.txt"))
    assert [(item.name, item.held) for item in packages] == [
        ("libnvidia-compute-580-server", False),
        ("nvidia-driver-580-server-open", True),
    ]
    assert host.unattended('APT::Periodic::Unattended-Upgrade "1";\n')
    assert not host.unattended('APT::Periodic::Unattended-Upgrade "0";\n')
    assert not host.unattended("")
    assert host.memory("MemTotal:       24622276 kB\nHugePages_Total:       3\n") == {
        "MemTotal": 24622276 << 10,
        "HugePages_Total": 3,
    }
    assert host.release('ID=ubuntu\nVERSION_ID="24.04"\n') == "ubuntu-24.04"
