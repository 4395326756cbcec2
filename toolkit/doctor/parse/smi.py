"""`nvidia-smi -q -x`: the driver's own account of its GPUs (nvidia-smi(1), nvsmi_device_v13.dtd).

What a driver does not have is absent or `N/A` and becomes None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

_NUMBER = re.compile(r"-?\d+")
_REMAPPED = "remapped_rows/remapped_row_"
_ANSWERS = {
    "Enabled": True,
    "Disabled": False,
    "Yes": True,
    "No": False,
    "Active": True,
    "On": True,
    "Off": False,
}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that the driver knows on a GPU.

    Attributes:
        pid: its id, as this host counts.
        kind: `C` compute, `G` graphics, `C+G` both, `M+C` compute under MPS.
        name: its program.
        used_mib: memory it holds, MiB; None where that is not told.
    """

    pid: int
    kind: str
    name: str
    used_mib: int | None


@dataclass(frozen=True, slots=True)
class Link:
    """The PCIe link of a GPU: generations (1 is 2.5 GT/s) and lanes, now and at most.

    Attributes:
        generation: now; falls to 1 when idle.
        max_generation: that GPU and slot can do together.
        device_generation: that the GPU can do in any slot.
        width: lanes now.
        max_width: that GPU and slot can do together.
    """

    generation: int | None
    max_generation: int | None
    device_generation: int | None
    width: int | None
    max_width: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: in PCI order, as nvidia-smi counts.
        name: as it prints it.
        uuid: `GPU-...`.
        address: PCI address as in sysfs, `0000:17:00.0`.
        memory_mib: in all, MiB.
        used_mib: in use, MiB.
        persistence: persistence mode.
        mig: whether it is split.
        ecc: whether ECC is on now.
        ecc_pending: and after the next reset.
        uncorrectable: uncorrectable memory errors since the driver was loaded.
        uncorrectable_ever: in the GPU's life.
        repair_pending: a row or page waits for a reset to be replaced.
        repair_failed: a row could not be replaced.
        recovery: what the driver asks for after a fault, `Reset`, `Reboot`, `Drain P2P`; None for nothing.
        performance_state: `P0` (fastest) to `P12`.
        utilization: percent of the last second in which a kernel ran.
        link: its PCIe link.
        fabric_state: `Completed`, `In Progress`, `Not Started`; None without an NVLink fabric.
        fabric_status: how it completed, `Success`.
        processes: on it.
    """

    index: int
    name: str
    uuid: str
    address: str
    memory_mib: int | None
    used_mib: int | None
    persistence: bool | None
    mig: bool | None
    ecc: bool | None
    ecc_pending: bool | None
    uncorrectable: int | None
    uncorrectable_ever: int | None
    repair_pending: bool
    repair_failed: bool
    recovery: str | None
    performance_state: str | None
    utilization: int | None
    link: Link
    fabric_state: str | None
    fabric_status: str | None
    processes: tuple[GpuProcess, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Smi:
    """What the driver tells.

    Attributes:
        driver: version of the driver.
        cuda: newest CUDA version that it runs.
        gpus: in PCI order.
    """

    driver: str | None
    cuda: str | None
    gpus: tuple[Gpu, ...]


def parse_smi(text: str) -> Smi | None:
    """The driver's account; None where this is none."""
    try:
        root = ElementTree.fromstring(text)  # noqa: S314  the host's own program printed it
    except ElementTree.ParseError:
        return None
    if root.tag != "nvidia_smi_log":
        return None
    gpus = tuple(_gpu(index, item) for index, item in enumerate(root.findall("gpu")))
    return Smi(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def _gpu(index: int, item: ElementTree.Element) -> Gpu:
    volatile, ever = "ecc_errors/volatile/", "ecc_errors/aggregate/"
    return Gpu(
        index=index,
        name=_text(item, "product_name") or "?",
        uuid=_text(item, "uuid") or "?",
        address=pci_address(item.get("id") or _text(item, "pci/pci_bus_id") or ""),
        memory_mib=_number(item, "fb_memory_usage/total"),
        used_mib=_number(item, "fb_memory_usage/used"),
        persistence=_answer(item, "persistence_mode"),
        mig=_answer(item, "mig_mode/current_mig"),
        ecc=_answer(item, "ecc_mode/current_ecc"),
        ecc_pending=_answer(item, "ecc_mode/pending_ecc"),
        uncorrectable=_uncorrectable(item, volatile),
        uncorrectable_ever=_uncorrectable(item, ever),
        repair_pending=_answer(item, f"{_REMAPPED}pending") is True
        or _answer(item, "retired_pages/pending_retirement") is True
        or _answer(item, "ecc_errors/channel_repair_pending") is True
        or _answer(item, "ecc_errors/tpc_repair_pending") is True,
        repair_failed=_answer(item, f"{_REMAPPED}failure") is True
        or _answer(item, "ecc_errors/unrepairable_memory") is True,
        recovery=_recovery(item),
        performance_state=_text(item, "performance_state"),
        utilization=_number(item, "utilization/gpu_util"),
        link=_link(item),
        fabric_state=_text(item, "fabric/state"),
        fabric_status=_text(item, "fabric/status"),
        processes=tuple(_processes(item)),
    )


def _recovery(item: ElementTree.Element) -> str | None:
    text = _text(item, "gpu_recovery_action")
    return None if text == "None" else text


def _link(item: ElementTree.Element) -> Link:
    generation, width = "pci/pci_gpu_link_info/pcie_gen/", "pci/pci_gpu_link_info/link_widths/"
    return Link(
        generation=_number(item, f"{generation}current_link_gen"),
        max_generation=_number(item, f"{generation}max_link_gen"),
        device_generation=_number(item, f"{generation}max_device_link_gen"),
        width=_number(item, f"{width}current_link_width"),
        max_width=_number(item, f"{width}max_link_width"),
    )


def _uncorrectable(item: ElementTree.Element, where: str) -> int | None:
    """Uncorrectable errors of memory and SRAM; newer drivers split the SRAM's."""
    counts = [
        _number(item, where + name)
        for name in (
            "dram_uncorrectable",
            "sram_uncorrectable",
            "sram_uncorrectable_parity",
            "sram_uncorrectable_secded",
        )
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _processes(item: ElementTree.Element) -> Iterator[GpuProcess]:
    for entry in item.findall("processes/process_info"):
        pid = _number(entry, "pid")
        if pid is not None:
            name = _text(entry, "process_name") or "?"
            yield GpuProcess(pid, _text(entry, "type") or "?", name, _number(entry, "used_memory"))


def pci_address(text: str) -> str:
    """`00000000:17:00.0`, as the driver writes it, as sysfs and lspci do: `0000:17:00.0`."""
    return text.strip().lower()[-len("0000:17:00.0") :]


def _text(item: ElementTree.Element, path: str) -> str | None:
    text = (item.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]", "Requested functionality has been deprecated") else text


def _number(item: ElementTree.Element, path: str) -> int | None:
    match = _NUMBER.match(_text(item, path) or "")
    return None if match is None else int(match[0])


def _answer(item: ElementTree.Element, path: str) -> bool | None:
    return _ANSWERS.get(_text(item, path) or "")
