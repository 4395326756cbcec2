"""Every check on recorded hosts: a healthy host passes, and each fault is found by its own check alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor import load_faults, profiles, recorded
from tests.doctor.raw import answer, raw
from tests.doctor.recorded import Site, addresses, b300, pcie, ports
from toolkit.doctor.catalogue import CHECKS
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Finding
from toolkit.doctor.report import judge
from toolkit.doctor.wanted import Wanted, wanted_of
from toolkit.profile.loading import load_profile

PCIE, B300 = profiles.profile(profiles.PCIE), profiles.profile(profiles.B300)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.105\n"
WORKSTATION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
PACKAGE = "nvidia-driver-580-server-open"
STRANGER = (4242, "C", "/usr/bin/python3", 81234)


@dataclass(frozen=True)
class Fault:
    """What is wrong, and what has to be said of it.

    Attributes:
        site: the host.
        check: that finds it.
        level: of the finding.
        words: a part of what is seen.
        profile: that is asked for.
        facts: others than the site's.
    """

    site: Site
    check: str
    level: str
    words: str
    profile: Wanted = PCIE
    facts: dict[str, Any] = field(default_factory=dict)


def looked(site: Site, profile: Any = PCIE, **changes: Any) -> list[Finding]:
    """Warnings and failures."""
    return judge(raw(site, **changes), profile).of("warn", "fail")


@pytest.mark.parametrize(("site", "profile"), [(pcie(), PCIE), (b300(), B300)], ids=["pcie", "b300"])
def test_a_healthy_host_passes_everything_that_concerns_it(site: Site, profile: Any) -> None:
    report = judge(raw(site), profile)
    assert report.of("warn", "fail") == []
    assert report.exit_code == 0
    concerned = {check.name for check in CHECKS if check.unconcerned(profile) is None}
    assert {item.check for item in report.of("pass")} == concerned
    assert {item.check for item in report.findings} == {check.name for check in CHECKS}


def test_one_gpu_needs_no_links_to_others() -> None:
    one = wanted_of(load_profile("h200-nvlink", overlays=("qwen3-8b", "gpus-1")).profile)
    assert one.hardware.interconnect == "nvlink"
    nvlink = next(check for check in CHECKS if check.name == "nvlink")
    assert nvlink.unconcerned(one) == "the profile uses one GPU"
    assert nvlink.unconcerned(B300) is None


FAULTS = {
    "no nvidia-smi": Fault(
        pcie(), "driver", "fail", "no nvidia-smi", facts={"command_smi": answer(status=None, why="missing")}
    ),
    "nvidia-smi hangs": Fault(
        pcie(), "driver", "fail", "does not end", facts={"command_smi": answer(status=None, why="slow")}
    ),
    "driver and library differ": Fault(
        replace(pcie(), broken=(18, MISMATCH), library="580.105.08"),
        "driver",
        "fail",
        "kernel module 580.95.05, library 580.105.08",
    ),
    "a library of another version too": Fault(
        pcie(),
        "driver",
        "warn",
        "570.86.15",
        facts={"libraries": ["libcuda.so.580.95.05", "libcuda.so.570.86.15"]},
    ),
    "the module is not loaded": Fault(
        replace(pcie(), broken=(9, NO_DRIVER)),
        "driver",
        "fail",
        "the nvidia module is not loaded",
        facts={"files": {}},
    ),
    "nouveau": Fault(replace(pcie(), modules=("nvidia", "nouveau")), "nouveau", "fail", "nouveau is loaded"),
    "nouveau has a GPU": Fault(replace(pcie(), nouveau=(addresses()[2],)), "nouveau", "fail", addresses()[2]),
    "packages not held": Fault(
        replace(pcie(), packages=((PACKAGE, "install", "580.95.05-1"),)),
        "driver-packages",
        "warn",
        f"{PACKAGE} not held and apt upgrades by itself",
    ),
    "a GPU is missing": Fault(
        pcie().without(3), "gpu-count", "fail", f"7 GPUs; the driver does not have {addresses()[3]}"
    ),
    "another model": Fault(
        pcie().with_card(5, name="NVIDIA RTX 6000 Ada Generation"),
        "gpu-model",
        "fail",
        "NVIDIA RTX 6000 Ada Generation",
    ),
    "the same chip in another form": Fault(
        pcie().with_cards(name=WORKSTATION), "gpu-model", "warn", WORKSTATION
    ),
    "an old driver": Fault(
        replace(pcie(), driver="570.86.15", library="570.86.15"), "cuda", "fail", "driver 570.86.15"
    ),
    "a driver for an older CUDA": Fault(
        pcie(),
        "cuda",
        "fail",
        "driver 580.95.05 runs CUDA up to 13.0",
        profile=profiles.profile(profiles.PCIE, "hardware.cuda=13.1", "hardware.min_driver=580.65.06"),
    ),
    "links fewer than the model has": Fault(
        b300(),
        "nvlink",
        "fail",
        "GPU 0: 12 links",
        profile=B300,
        facts={"command_nvlink": answer(recorded.nvlink(replace(b300(), nvlink=12)))},
    ),
    "a narrow slot": Fault(
        pcie().with_card(4, width=8, max_width=8),
        "pcie-link",
        "warn",
        "GPU 4 (0000:96:00.0): the slot gives x8",
    ),
    "another distribution": Fault(
        pcie(), "os", "warn", "debian-12", facts={"file_/etc/os-release": "ID=debian\nVERSION_ID=12\n"}
    ),
    "another Python": Fault(
        pcie(), "python", "fail", "Python 3.11.2", facts={"command_python": answer("Python 3.11.2\n")}
    ),
    "less memory": Fault(pcie().with_card(6, total_mib=49140), "gpu-memory", "fail", "GPU 6: 48.0 GiB"),
    "uncorrectable errors": Fault(
        pcie().with_card(1, uncorrectable=2), "ecc", "fail", "2 uncorrectable memory errors since"
    ),
    "uncorrectable errors of old": Fault(
        pcie().with_card(1, uncorrectable_ever=2), "ecc", "warn", "2 uncorrectable memory errors in its life"
    ),
    "a row waits for a reset": Fault(
        pcie().with_card(1, repair_pending="Yes"), "ecc", "fail", "waits for a reset"
    ),
    "a row could not be replaced": Fault(
        pcie().with_card(1, repair_failed="Yes"), "ecc", "fail", "could not be replaced"
    ),
    "a GPU that wants a reset": Fault(
        pcie().with_card(1, recovery="Reset"), "ecc", "fail", "the driver asks for 'Reset' after a fault"
    ),
    "ECC on some only": Fault(
        pcie().with_card(4, ecc="Disabled", pending_ecc="Disabled"), "ecc", "warn", "ECC is off on GPU 4"
    ),
    "ECC changes with the next reset": Fault(
        pcie().with_card(4, pending_ecc="Disabled"), "ecc", "warn", "ECC is off after the next reset"
    ),
    "MIG": Fault(b300().with_card(7, mig="Enabled"), "mig", "fail", "MIG is on: GPU 7", profile=B300),
    "persistence": Fault(
        b300().with_cards(persistence="Disabled"),
        "persistence",
        "warn",
        "off: GPUs 0, 1, 2, 3, 4, 5, 6, 7",
        profile=B300,
    ),
    "a foreign process": Fault(
        pcie().with_card(2, processes=(STRANGER,), used_mib=81240),
        "gpu-processes",
        "fail",
        "process 4242 (/usr/bin/python3) of alice is on GPU 2, 81234 MiB, in /user",
        facts={"processes": {"4242": {"name": "python3", "user": "alice", "group": "/user.slice/s.scope"}}},
    ),
    "a desktop": Fault(
        pcie().with_card(0, processes=((900, "G", "/usr/lib/xorg/Xorg", 60),)),
        "gpu-processes",
        "warn",
        "Xorg",
    ),
    "memory held by nobody": Fault(
        pcie().with_card(2, used_mib=70000), "gpu-processes", "fail", "GPU 2 70000 MiB"
    ),
    "too few lanes": Fault(pcie().with_card(4, width=8), "pcie-link", "fail", "GPU 4 (0000:96:00.0): x8"),
    "a slow slot": Fault(
        pcie().with_card(4, max_generation=4), "pcie-link", "warn", "the slot gives generation 4"
    ),
    "slow under load": Fault(
        pcie().with_card(4, generation=2, state="P1", utilization=97),
        "pcie-link",
        "warn",
        "generation 2 under load",
    ),
    "ACS": Fault(
        replace(pcie(), acs=ports()[:2]),
        "acs",
        "fail",
        f"CmpltRedir and ReqRedir on {ports()[0]}, {ports()[1]}",
    ),
    "ACS with NVLink": Fault(replace(b300(), acs=ports()[:1]), "acs", "warn", ports()[0], profile=B300),
    "no lspci": Fault(
        pcie(), "acs", "warn", "not known", facts={"command_lspci": answer(status=None, why="missing")}
    ),
    "IOMMU": Fault(
        replace(pcie(), iommu="DMA-FQ", cmdline="ro intel_iommu=on"),
        "iommu",
        "fail",
        "type DMA-FQ (intel_iommu=on",
    ),
    "NVLink between some only": Fault(
        replace(b300(), nvlink=0),
        "topology",
        "fail",
        "GPU 0 and 1: NODE",
        profile=B300,
        facts={"command_nvlink": answer(recorded.nvlink(b300()))},
    ),
    "a short P2P level": Fault(
        pcie(),
        "topology",
        "warn",
        "NCCL_P2P_LEVEL is PHB",
        profile=profiles.profile(profiles.PCIE, "service.environment.NCCL_P2P_LEVEL=PHB"),
    ),
    "no peer-to-peer": Fault(replace(pcie(), refused={(0, 5): "CNS"}), "p2p", "fail", "GPU 0 and 5: CNS"),
    "a link is down": Fault(
        b300(),
        "nvlink",
        "fail",
        "GPU 0: 17 links",
        profile=B300,
        facts={
            "command_nvlink": answer(
                recorded.nvlink(b300()).replace("Link 17: 53.125 GB/s", "Link 17: <inactive>", 1)
            )
        },
    ),
    "fabric in progress": Fault(
        b300().with_cards(fabric=("In Progress", "N/A")),
        "fabric",
        "fail",
        "fabric state 'In Progress' on all GPUs",
        profile=B300,
    ),
    "fabric failed": Fault(
        b300().with_card(3, fabric=("Completed", "Insufficient Resources")),
        "fabric",
        "fail",
        "GPU 3: Insufficient Resources",
        profile=B300,
    ),
    "no fabric manager": Fault(
        replace(b300(), fabric_unit=("not-found", "inactive", "success")),
        "fabric-manager",
        "fail",
        "is not installed",
        profile=B300,
    ),
    "fabric manager failed": Fault(
        replace(b300(), fabric_unit=("loaded", "failed", "exit-code")),
        "fabric-manager",
        "fail",
        "is failed, exit-code",
        profile=B300,
    ),
    "fabric manager of another version": Fault(
        replace(b300(), fabric_manager="580.82.07"),
        "fabric-manager",
        "fail",
        "fabric manager 580.82.07, driver 580.95.05",
        profile=B300,
    ),
    "a GPU at no NUMA node": Fault(
        pcie(),
        "numa",
        "warn",
        "GPU 4 at no known NUMA node",
        facts={
            "command_topology": answer(
                recorded.topology(pcie()).replace("64-127\t1\t\tN/A", "64-127\tN/A\t\tN/A", 1)
            )
        },
    ),
    "the sandbox does not start": Fault(
        pcie(),
        "sandbox",
        "fail",
        "Unknown assignment",
        facts={"sandbox": {"user": "ddtoolkit", "seen": None, "why": "Unknown assignment: ProtectClock=yes"}},
    ),
    "the sandbox hides the GPUs": Fault(
        pcie(),
        "sandbox",
        "fail",
        "0 GPUs are seen inside: No devices were found",
        facts={"inside_gpus": {"status": 9, "out": "No devices were found\n", "err": ""}},
    ),
    "no unified memory device": Fault(
        pcie(),
        "sandbox",
        "fail",
        "/dev/nvidia-uvm: No such file",
        facts={"inside_devices": {"/dev/nvidiactl": "", "/dev/nvidia-uvm": "No such file or directory"}},
    ),
    "locked memory": Fault(
        pcie(), "limits", "fail", "LimitMEMLOCK is 8192 KiB", facts={"inside_memlock": 8 << 20}
    ),
    "few descriptors": Fault(pcie(), "limits", "warn", "LimitNOFILE is 1024", facts={"inside_nofile": 1024}),
    "a cache of somebody else": Fault(
        pcie(),
        "cache",
        "fail",
        "/var/cache/x is not writable for ddtoolkit",
        facts={"inside_folders": {"/var/cache/x": "not writable"}},
    ),
    "no nvcc": Fault(
        pcie(),
        "compilers",
        "warn",
        "no nvcc on the unit's PATH (/usr/local/bin:/usr/bin)",
        facts={"inside_programs": {"ninja": "n", "cc": "c", "nvcc": None}},
    ),
    "no ninja, and nothing brings it": Fault(
        pcie(),
        "compilers",
        "fail",
        "no ninja",
        profile=profiles.profile(profiles.PCIE, "host.packages=[]"),
        facts={"inside_programs": {"ninja": None, "cc": "c", "nvcc": "n"}},
    ),
    "no compiler, and nothing brings it": Fault(
        pcie(),
        "compilers",
        "fail",
        "no C compiler",
        profile=profiles.profile(profiles.PCIE, "host.packages=[]"),
        facts={"inside_programs": {"ninja": "n", "cc": None, "nvcc": "n"}},
    ),
    "a full disk": Fault(
        pcie(),
        "disk",
        "fail",
        "100 MiB free at /opt",
        facts={"disks": [{"path": "/opt", "free": 100 << 20, "problem": ""}]},
    ),
    "no room for checkpoints": Fault(
        pcie(),
        "disk",
        "fail",
        "needs 600 GB",
        facts={"weights": {"lacking": [], "problem": "", "short": "needs 600 GB, 80 GB are free"}},
    ),
    "a source that does not answer": Fault(
        pcie(),
        "disk",
        "warn",
        "no answer",
        facts={"weights": {"lacking": [], "problem": "no answer", "short": None}},
    ),
    "little memory": Fault(replace(pcie(), memory_gib=16), "ram", "fail", "16.0 GiB"),
    "little shared memory": Fault(
        pcie(), "shared-memory", "fail", "64 MiB", facts={"shared_memory": 64 << 20}
    ),
    "the port is another's": Fault(
        pcie(),
        "port",
        "fail",
        "in use",
        facts={"port": {"busy": "port 30000 on 127.0.0.1 is in use", "pid": 77}},
    ),
    "the clock": Fault(
        pcie(),
        "time",
        "warn",
        "not synchronised, and no NTP service is on",
        facts={"command_time": answer("NTP=no\nNTPSynchronized=no\n")},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_own_check_alone(name: str) -> None:
    fault = FAULTS[name]
    found = looked(fault.site, fault.profile, **fault.facts)
    assert [(item.check, item.level) for item in found] == [(fault.check, fault.level)], found
    assert fault.words in found[0].seen
    assert found[0].expected
    assert found[0].fix


def test_every_check_has_a_fault_that_it_finds() -> None:
    under_load = {fault.check for fault in load_faults.FAULTS.values()}
    assert {fault.check for fault in FAULTS.values()} | under_load == {check.name for check in CHECKS}


def test_every_check_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.partition("## The checks")[2]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE) == [check.name for check in CHECKS]


def test_the_service_itself_is_no_stranger() -> None:
    site = pcie().with_cards(processes=(STRANGER,), used_mib=81240)
    mine = {"own": [4242], "port": {"busy": "port 30000 is in use", "pid": 4242}}
    assert looked(site, PCIE, **mine) == []


def test_a_process_on_a_gpu_that_is_not_used_is_nobodys_business() -> None:
    site = pcie().with_card(5, processes=(STRANGER,), mig="Enabled")
    two = ("hardware.count=2", "parallelism.tp=2", "model.target.shape=null")
    assert looked(site, profiles.profile(profiles.PCIE, *two)) == []
    visible = (*two, "service.environment.CUDA_VISIBLE_DEVICES=4,5")
    found = looked(site, profiles.profile(profiles.PCIE, *visible))
    assert {item.check for item in found} == {"mig", "gpu-processes"}


def test_an_idle_link_at_its_first_generation_is_no_fault() -> None:
    report = judge(raw(pcie().with_cards(generation=1, state="P8")), PCIE)
    (link,) = [item for item in report.findings if item.check == "pcie-link"]
    assert (link.level, link.seen) == ("pass", "generation 5 x16, at 1 while idle")


def test_a_container_is_warned_of_what_it_cannot_grant() -> None:
    found = looked(pcie(), PCIE, command_container=answer("systemd-nspawn\n"), inside_memlock=8 << 20)
    assert [(item.check, item.level) for item in found] == [("limits", "warn")]


def test_peer_to_peer_that_the_profile_turns_off_is_not_asked_for() -> None:
    profile = profiles.profile(profiles.PCIE, "service.environment.NCCL_P2P_DISABLE=1")
    report = judge(raw(replace(pcie(), refused={(0, 1): "CNS"})), profile)
    (p2p,) = [item for item in report.findings if item.check == "p2p"]
    assert p2p.level == "skip"
    assert "NCCL_P2P_DISABLE" in p2p.seen


def test_nothing_is_said_of_gpus_that_nobody_could_ask() -> None:
    report = judge(raw(replace(pcie(), broken=(18, MISMATCH))), PCIE)
    silent = {item.check for item in report.of("skip") if item.seen == "the driver does not answer"}
    assert silent == {check.name for check in CHECKS if check.about != "host" and not check.unconcerned(PCIE)}
    assert [item.check for item in report.of("fail")] == ["driver"]


def test_a_host_without_gpus_lacks_them_and_nothing_else_of_them() -> None:
    report = judge(raw(replace(pcie(), cards=())), PCIE)
    assert [(item.check, item.seen[:6]) for item in report.of("warn", "fail")] == [("gpu-count", "0 GPUs")]
    assert all(item.seen for item in report.findings)


def test_an_ignored_failure_does_not_count_and_is_told() -> None:
    facts = raw(replace(pcie(), acs=ports()))
    assert judge(facts, PCIE).exit_code == 1
    report = judge(facts, PCIE, ignored=["acs"])
    assert report.exit_code == 0
    assert report.to_json()["ignored"] == ["acs"]
    assert [item.check for item in report.of("fail")] == ["acs"]
    assert judge(facts, PCIE, ignored=["iommu"]).exit_code == 1


NO_SYSTEMD = {
    "systemd": False,
    "sandbox": {
        "user": "root",
        "seen": None,
        "why": "System has not been booted with systemd as init system",
    },
    "command_fabric_unit": answer("", 1),
}


def test_without_systemd_nothing_of_systemd_is_proposed() -> None:
    site = b300().with_cards(persistence="Disabled")
    report = judge(raw(site, **NO_SYSTEMD), B300)
    found = {item.check: item for item in report.of("warn", "fail")}
    assert set(found) == {"sandbox", "persistence"}
    assert found["sandbox"].seen == "systemd does not run this host"
    assert "service.manager: process" in found["sandbox"].fix
    assert found["persistence"].fix == "nvidia-smi -pm 1, which lasts until the next boot"
    assert not any("systemctl" in item.fix for item in report.findings)
    assert all("booted" not in item.seen for item in report.findings)
    assert "systemctl" in looked(site, B300)[0].fix


def test_a_source_that_is_not_reached_is_told_with_what_its_own_error_proposes() -> None:
    weights = {"lacking": [], "problem": "https://h/x: no route", "fix": "name a folder", "short": None}
    (found,) = looked(pcie(), weights=weights)
    assert (found.check, found.fix) == ("disk", "name a folder")


def test_a_pinned_driver_of_another_branch_asks_for_a_reboot() -> None:
    profile = profiles.profile(profiles.PCIE, f"host.packages=[{PACKAGE}=590.44.01-1]")
    (found,) = looked(replace(pcie(), packages=((PACKAGE, "hold", "580.95.05-1"),)), profile)
    assert (found.check, found.level) == ("driver-packages", "warn")
    assert found.seen == f"{PACKAGE} goes from branch 580 to 590"
    assert "reboot" in found.fix


def test_packages_are_no_subject_without_a_driver() -> None:
    facts = raw(pcie(), command_smi=answer(status=None, why="missing"), command_packages=answer(""))
    found = {item.check: item for item in judge(facts, PCIE).findings}
    assert (found["driver-packages"].level, found["driver-packages"].seen) == ("skip", "there is no driver")


def test_a_profile_without_gpus_is_asked_nothing_about_them() -> None:
    report = judge(raw(pcie()), profiles.profile("local-cpu"))
    assert {item.check for item in report.of("pass")} == {"disk", "ram", "port", "time"}
    assert all(item.seen for item in report.of("skip"))


def test_hundreds_of_processes_are_told_in_a_few_lines() -> None:
    many = tuple((1000 + number, "C", "python3", 10) for number in range(300))
    found = looked(pcie().with_cards(processes=many, used_mib=4000))
    assert [item.check for item in found] == ["gpu-processes"] * 6
    assert found[0].seen == "process 1000 (python3) is on GPUs 0, 1, 2, 3, 4, 5, 6, 7, 80 MiB"
    assert found[-1].seen.endswith(", and 294 more processes")


def test_a_desktop_is_told_after_what_computes() -> None:
    site = pcie().with_card(0, processes=((7, "G", "Xorg", 4), (8, "C", "python3", 9)))
    assert [(item.level, item.seen.split()[1]) for item in looked(site)] == [("fail", "8"), ("warn", "7")]


def test_a_disk_that_cannot_be_asked_is_warned_of() -> None:
    disks = [{"path": "/srv", "free": None, "problem": "it did not answer"}, *raw(pcie())["disks"]]
    (found,) = looked(pcie(), disks=disks)
    assert (found.check, found.level, found.seen) == ("disk", "warn", "/srv: it did not answer")


def test_gpus_are_chosen_as_cuda_reads_them() -> None:
    def used(visible: str) -> list[int]:
        profile = profiles.profile(profiles.PCIE, f"service.environment.CUDA_VISIBLE_DEVICES={visible}")
        return [gpu.index for gpu in Facts(raw(pcie())).used(profile)]

    assert used("5,2") == [5, 2]
    assert used("GPU-00000003-0000,1") == [3, 1]
    assert used("1,9,2") == [1]  # what names no GPU ends the list
    assert used("1,1") == [1]
    assert used("GPU-0") == []
    assert used("MIG-1,2") == []
    assert used("-1") == []
