"""Rules of the machine: GPUs against the catalogue, driver against CUDA, NCCL against what joins the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.hardware.catalogue import find_gpu, nearest_name, oldest_driver, version_of
from toolkit.profile.rules.finding import Finding, doubt, error
from toolkit.profile.schema import Profile

_NEAR = 0.02  # nvidia-smi's memory.total varies a little with ECC and firmware
_LEVEL = "NCCL_P2P_LEVEL"
_PCIE_LEVELS = ("PIX", "PXB", "PHB", "SYS", "LOC")


def machine_rules(profile: Profile) -> Iterator[Finding]:
    """What of `hardware` contradicts the catalogue, and NCCL's variables what joins the GPUs."""
    if profile.hardware.device != "cuda":
        if profile.hardware.driver is not None:
            said = "the engine computes on the CPU: it needs no driver"
            yield error(said, "hardware.driver", "hardware.device", hint="take it out")
        return
    yield from _catalogue(profile)
    yield from _driver(profile)
    yield from _prepared(profile)
    yield from _joined(profile)
    yield from _nccl(profile)


def _catalogue(profile: Profile) -> Iterator[Finding]:
    hardware = profile.hardware
    if hardware.gpu is None:
        return
    gpu = find_gpu(hardware.gpu)
    if gpu is None:
        near = nearest_name(hardware.gpu)
        yield doubt(
            f"{hardware.gpu!r} is not in the catalogue: its memory and speed are not known",
            "hardware.gpu",
            hint=f"did you mean {near}?" if near else "set hardware.memory_gib and compute_capability",
        )
        return
    if hardware.compute_capability not in (None, gpu.compute_capability):
        yield error(
            f"{hardware.gpu} has compute capability {gpu.compute_capability}",
            "hardware.compute_capability",
            "hardware.gpu",
            hint="take it out",
        )
    memory = hardware.memory_gib
    if memory is not None and abs(memory - gpu.memory_gib) > _NEAR * gpu.memory_gib:
        yield error(
            f"{hardware.gpu} has {gpu.memory_gib:.1f} GiB, not {memory:g}",
            "hardware.memory_gib",
            "hardware.gpu",
            hint="take it out",
        )
    if hardware.interconnect == "nvlink" and gpu.interconnect != "nvlink":
        yield error(f"{hardware.gpu} has no NVLink", "hardware.interconnect", "hardware.gpu", hint="pcie")
    elif hardware.interconnect == "pcie" and gpu.interconnect == "nvlink" and hardware.count > 1:
        yield doubt(
            f"{hardware.gpu} are joined by NVLink, which is then not looked at",
            "hardware.interconnect",
            "hardware.gpu",
            hint="nvlink",
        )


def _driver(profile: Profile) -> Iterator[Finding]:
    cuda, driver = profile.hardware.cuda, profile.hardware.min_driver
    needed = None if cuda is None else oldest_driver(cuda)
    if needed is not None and driver is not None and version_of(driver) < version_of(needed):
        yield error(
            f"driver {driver} does not run CUDA {cuda}, which needs {needed}",
            "hardware.min_driver",
            "hardware.cuda",
            hint=needed,
        )


def _prepared(profile: Profile) -> Iterator[Finding]:
    """What `hosts prepare` is asked for."""
    hardware, driver = profile.hardware, profile.hardware.driver
    if driver is None:
        return
    floor = hardware.min_driver
    if floor is not None and driver.branch < version_of(floor)[0]:
        yield error(
            f"branch {driver.branch} has no driver of {floor} or newer",
            "hardware.driver.branch",
            "hardware.min_driver",
            hint=str(version_of(floor)[0]),
        )
    if driver.cuda_toolkit and hardware.cuda is None:
        yield error(
            "which CUDA toolkit is not known",
            "hardware.driver.cuda_toolkit",
            "hardware.cuda",
            hint="set hardware.cuda, or cuda_toolkit: false",
        )
    if driver.acs_off and hardware.interconnect != "pcie":
        yield error(
            "only GPUs that are joined by PCIe reach each other through bridges with ACS",
            "hardware.driver.acs_off",
            "hardware.interconnect",
            hint="take it out",
        )
    if driver.fabric_manager is not None and hardware.interconnect != "nvlink":
        yield error(
            "only NVLink switches have a fabric manager",
            "hardware.driver.fabric_manager",
            "hardware.interconnect",
            hint="take it out",
        )


def _joined(profile: Profile) -> Iterator[Finding]:
    hardware, spread = profile.hardware, profile.parallelism
    if hardware.interconnect == "none" and hardware.count > 1 and spread.tp * spread.pp > 1:
        yield error(
            f"{hardware.count} GPUs that share a model are joined by something",
            "hardware.interconnect",
            "hardware.count",
            "parallelism.tp",
            "parallelism.pp",
            hint="pcie or nvlink",
        )


def _nccl(profile: Profile) -> Iterator[Finding]:
    joined = profile.hardware.interconnect
    level = profile.service.environment.get(_LEVEL, "").upper()
    key = ("service", "environment", _LEVEL)
    if joined == "pcie" and level == "NVL":
        yield error(
            "NVL allows peer-to-peer over NVLink only, which these GPUs lack: all would go through the host",
            key,
            "hardware.interconnect",
            hint="SYS, or PHB where SYS hangs",
        )
    elif joined == "nvlink" and level in _PCIE_LEVELS:
        yield doubt(
            f"{level} is for GPUs joined by PCIe; over NVLink NCCL needs no level",
            key,
            "hardware.interconnect",
            hint="take it out",
        )
