"""PCIe: width and speed of links, and what keeps GPUs from reading each other's memory directly.

ACS and the IOMMU: NCCL user guide, Troubleshooting, "PCI Access Control Services (ACS)"; hangs in
github.com/NVIDIA/nccl/issues/2079.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.parse.pci import bridges_above
from toolkit.doctor.parse.smi import Gpu
from toolkit.doctor.wanted import Wanted
from toolkit.hardware.catalogue import Gpu as KnownGpu
from toolkit.hardware.catalogue import find_gpu

_BUSY = 10  # percent; below it the link may rest
_RESTING = ("P8", "P9", "P10", "P11", "P12", "P15")
_TRANSLATED = ("DMA", "DMA-FQ")


def link(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Every link has all its lanes, and its full speed where it is in use."""
    gpus, fine = facts.used(profile), True
    known = find_gpu(profile.hardware.gpu or "")
    for gpu in gpus:
        for result in (*_width(gpu), *_slot(gpu, known), *_speed(gpu)):
            fine = False
            yield result
    yield from _bridges(facts, gpus)
    idle = sorted({gpu.link.generation or 0 for gpu in gpus if _slow(gpu)})
    if fine and gpus:
        widths = sorted({gpu.link.width or 0 for gpu in gpus})
        most = sorted({gpu.link.max_generation or 0 for gpu in gpus})
        rests = f", at {_list(idle)} while idle" if idle else ""
        yield good(f"generation {_list(most)} x{_list(widths)}{rests}")


def _width(gpu: Gpu) -> Iterator[Result]:
    link = gpu.link
    if link.width is not None and link.max_width is not None and link.width < link.max_width:
        fix = "reseat the card or its riser; look at the slot's bifurcation in the BIOS"
        yield bad(f"{_name(gpu)}: x{link.width}", f"x{link.max_width}", fix)


def _slot(gpu: Gpu, known: KnownGpu | None) -> Iterator[Result]:
    """What the slot lets the GPU have, against what the GPU can do."""
    link = gpu.link
    device, most = link.device_generation, link.max_generation
    if device is not None and most is not None and most < device:
        fix = "set the slot to its full generation in the BIOS; a riser may not carry it"
        yield warning(f"{_name(gpu)}: the slot gives generation {most}", f"generation {device}", fix)
    if known is not None and link.max_width is not None and link.max_width < known.pcie_width:
        fix = "move it to a slot with all lanes, or look at the slot's bifurcation in the BIOS"
        yield warning(f"{_name(gpu)}: the slot gives x{link.max_width}", f"x{known.pcie_width}", fix)


def _speed(gpu: Gpu) -> Iterator[Result]:
    link = gpu.link
    most = link.max_generation
    # An idle link falls to generation 1 by itself: speed is judged under load alone.
    if _slow(gpu) and (gpu.utilization or 0) >= _BUSY and gpu.performance_state not in _RESTING:
        fix = "look for AER errors in dmesg; turn off ASPM (pcie_aspm=off); reseat the card"
        seen = f"{_name(gpu)}: generation {link.generation} under load"
        yield warning(seen, f"generation {most}", fix)


def _slow(gpu: Gpu) -> bool:
    link = gpu.link
    return (
        link.generation is not None
        and link.max_generation is not None
        and link.generation < link.max_generation
    )


def _bridges(facts: Facts, gpus: list[Gpu]) -> Iterator[Result]:
    """Bridges above the GPUs that run with fewer lanes than they have: worth a look, often by design."""
    narrow = {
        bridge.address: bridge
        for gpu in gpus
        for bridge in bridges_above(facts.devices, gpu.address)
        if bridge.width
        and bridge.max_width
        and bridge.width < bridge.max_width
        and bridge.width < (gpu.link.max_width or 0)
    }
    for bridge in narrow.values():
        fix = "look at the slot's wiring and bifurcation: GPUs behind it share fewer lanes"
        yield warning(f"bridge {bridge.address} runs x{bridge.width}", f"x{bridge.max_width}", fix)


def acs(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """No bridge above the GPUs redirects their traffic to the root complex."""
    answer = facts.command("lspci")
    if answer["why"] or not facts.devices:
        yield warning(
            "lspci does not answer: whether ACS is on is not known", "lspci", "apt-get install pciutils"
        )
        return
    if not facts.raw["root"]:
        yield skipped("only root is shown the capabilities of PCI bridges")
        return
    bridges = {
        bridge.address: bridge
        for gpu in facts.used(profile)
        for bridge in bridges_above(facts.devices, gpu.address)
    }
    on = [bridge for bridge in bridges.values() if bridge.redirects]
    if not on:
        yield good(f"no redirection on {len(bridges)} bridges above the GPUs")
        return
    words = sorted({word for bridge in on for word in bridge.redirects})
    seen = f"{' and '.join(words)} on {', '.join(bridge.address for bridge in on)}"
    fix = (
        "turn ACS off in the BIOS, or until the next boot: "
        f"for a in {' '.join(bridge.address for bridge in on)}; do setpci -s $a ECAP_ACS+6.w=0000; done"
    )
    expected = "no redirection: it makes peer-to-peer slow, or hang"
    found = bad if profile.hardware.interconnect == "pcie" else warning
    yield found(seen, expected, fix)


def iommu(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The IOMMU does not translate what GPUs write to each other."""
    pci = facts.raw["pci"]
    kinds = {pci["gpus"][gpu.address]["iommu"] for gpu in facts.used(profile) if gpu.address in pci["gpus"]}
    line = [word for word in (facts.file("/proc/cmdline") or "").split() if "iommu" in word]
    told = f" ({' '.join(line)} on the kernel's command line)" if line else ""
    translated = sorted(kinds & set(_TRANSLATED))
    if translated:
        fix = "boot with iommu=off (or iommu=pt), or turn VT-d or AMD-Vi off in the BIOS"
        found = bad if profile.hardware.interconnect == "pcie" else warning
        yield found(
            f"the GPUs are in IOMMU domains of type {', '.join(translated)}{told}", "off, or identity", fix
        )
    elif pci["iommus"]:
        yield good(f"{len(pci['iommus'])} IOMMUs, the GPUs pass through{told}")
    else:
        yield good(f"off{told}")


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.address})"


def _list(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
