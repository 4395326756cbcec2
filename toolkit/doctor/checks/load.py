"""Copies under load: between host and GPUs, and between GPUs.

A figure is judged where something physical says what it cannot be, and else against the best that the same
GPUs had before.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.checks.measured import (
    BESIDE,
    FABRIC,
    GENERATION,
    LANE,
    P2P,
    XID,
    ended,
    falls,
    gpu_list,
    measured,
    pcie_carries,
    span,
)
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.load_result import Load
from toolkit.doctor.parse.pci import bridges_above
from toolkit.doctor.parse.smi import Gpu
from toolkit.doctor.wanted import Wanted
from toolkit.hardware.catalogue import find_gpu

_SHOWN = 3


def bandwidth(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Copies between the host and each GPU, alone and all at once, and the links under that load."""
    load = measured(facts)
    if load.why:
        yield warning(f"not measured: {load.why}", "copies under load", load.fix)
        return
    yield from _left_alone(load)
    if not load.gpus:
        return
    results: list[Result] = []
    if len(load.together) < len(load.gpus):
        results += ended(load.copying, XID)
    for item in (*load.alone, *load.together):
        if item.wrong:
            seen = f"GPU {item.gpu}: {item.wrong} bytes came back other than they were sent"
            results.append(bad(seen, "every byte as it was sent", XID))
    if load.device == "cuda":
        used = {gpu.index: gpu for gpu in facts.used(profile)}
        results += _links(load, used, profile)
        results += [] if load.beside else _too_slow(load, facts, used)
    results += falls(load, "copy ")
    if load.problem:
        results.append(warning(load.problem, "a record for the next time", "free some space there"))
    yield from results
    if not results:
        yield good(_copied(load))


def p2p_bandwidth(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Copies from GPU to GPU, and that what arrives is what was sent."""
    load = measured(facts)
    if len(load.gpus) < 2:
        yield skipped(load.why or "there are no two GPUs that are free")
        return
    results: list[Result] = []
    if len(load.together) == len(load.gpus):
        results += ended(load.copying, P2P if profile.hardware.interconnect == "pcie" else FABRIC)
    results += _corrupted(load, profile)
    results += _apart(load, profile)
    if profile.hardware.interconnect == "nvlink" and not load.beside:
        results += _not_by_nvlink(load, pcie_carries(profile))
    results += falls(load, "peer ")
    yield from results
    if not results and load.peers:
        rates = [item.rate for item in load.peers]
        direct = sum(item.access for item in load.peers)
        yield good(f"{span(rates)} GB/s on {len(rates)} ways, {direct} of them direct; every byte arrived")
    elif not results:
        yield skipped("the copies before did not end")


def _unused(profile: Wanted) -> bool:
    return profile.service.environment.get("NCCL_P2P_DISABLE") == "1"


def _corrupted(load: Load, profile: Wanted) -> Iterator[Result]:
    """Bytes that did not arrive as they were sent: ACS and the IOMMU can do that without a word."""
    found = warning if _unused(profile) else bad
    wrong = [item for item in load.peers if item.wrong]
    for number, item in enumerate(wrong[:_SHOWN], 1):
        pair = f"from GPU {item.source} to GPU {item.target}"
        more = f", and {len(wrong) - _SHOWN} more ways" if number == _SHOWN < len(wrong) else ""
        seen = f"{pair} {item.wrong} bytes arrived other than they were sent{more}"
        yield found(seen, "every byte as it was sent", P2P)


def _apart(load: Load, profile: Wanted) -> Iterator[Result]:
    """GPUs that the driver does not let read each other's memory."""
    apart = [item for item in load.peers if not item.access]
    if apart and not _unused(profile):
        more = f" ({len(apart)} of {len(load.peers)} ways)" if len(apart) > 1 else ""
        seen = f"GPU {apart[0].target} has no direct access to GPU {apart[0].source}{more}"
        yield warning(seen, "access, so that copies do not go through the host's memory", P2P)


def _not_by_nvlink(load: Load, carried: float) -> Iterator[Result]:
    """Copies that PCIe would carry as well, with `carried` 10^9 bytes a second."""
    slow = [item for item in load.peers if item.rate <= carried]
    if slow:
        worst = min(slow, key=lambda item: item.rate)
        more = f" ({len(slow)} of {len(load.peers)} ways)" if len(slow) > 1 else ""
        seen = (
            f"from GPU {worst.source} to GPU {worst.target} {worst.rate:.1f} GB/s{more}: PCIe carries as much"
        )
        yield warning(seen, f"NVLink: more than {carried:.0f} GB/s", FABRIC)


def _left_alone(load: Load) -> Iterator[Result]:
    """GPUs that somebody uses."""
    by: dict[str, list[int]] = {}
    for gpu, user in load.busy.items():
        if gpu not in load.gpus:
            by.setdefault(user, []).append(gpu)
    for user, gpus in by.items():
        yield skipped(f"{gpu_list(gpus)} in use by {user} (--disruptive loads it all the same)")


def _links(load: Load, used: dict[int, Gpu], profile: Wanted) -> Iterator[Result]:
    """Links under load below what GPU and slot have."""
    known = find_gpu(profile.hardware.gpu or "")
    found = bad if profile.hardware.interconnect == "pcie" else warning
    fix = "look for AER errors in dmesg; turn off ASPM (pcie_aspm=off); reseat the card"
    for link in load.links:
        gpu = used.get(link.gpu)
        most = [None if gpu is None else gpu.link.max_generation, known and known.pcie_generation]
        best = min((number for number in most if number), default=None)
        if best and link.generation and link.generation < best:
            yield found(f"GPU {link.gpu}: generation {link.generation} under load", f"generation {best}", fix)
        wide = None if gpu is None else gpu.link.max_width
        if wide and link.width and link.width < wide:
            yield found(f"GPU {link.gpu}: x{link.width} under load", f"x{wide}", fix)


def _too_slow(load: Load, facts: Facts, used: dict[int, Gpu]) -> Iterator[Result]:
    """A GPU alone with no more than half of what its way carries: a lane in two or a generation is lost."""
    for item in load.alone:
        way = _narrowest(facts, used[item.gpu]) if item.gpu in used else None
        if way is not None and min(item.to, item.back) <= way[0] / 2:
            seen = f"GPU {item.gpu} alone: {item.to:.1f} GB/s to it, {item.back:.1f} from it"
            expected = f"more than half of the {way[0]:.0f} GB/s that its way carries ({way[1]})"
            fix = "look at the slot, at memory channels that are empty, and at the BIOS' power settings"
            yield warning(seen, expected, fix)


def _narrowest(facts: Facts, gpu: Gpu) -> tuple[float, str] | None:
    """10^9 bytes a second of the narrowest link between the host and a GPU, and which it is.

    None where no bridge above the GPU is told: its own link may not be the narrowest.
    """
    links = [
        (LANE.get(GENERATION.get(bridge.max_speed or 0.0, 0), 0.0) * (bridge.max_width or 0), bridge.address)
        for bridge in bridges_above(facts.devices, gpu.address)
    ]
    known = [(rate, f"bridge {address}") for rate, address in links if rate]
    own = LANE.get(gpu.link.max_generation or 0, 0.0) * (gpu.link.max_width or 0)
    if not known or not own:
        return None
    return min([*known, (own, f"generation {gpu.link.max_generation} x{gpu.link.max_width}")])


def _copied(load: Load) -> str:
    to, back = [item.to for item in load.alone], [item.back for item in load.alone]
    parts = [f"{gpu_list(load.gpus)} alone: {span(to)} GB/s to, {span(back)} from"]
    if len(load.gpus) > 1:
        all_to, all_back = [item.to for item in load.together], [item.back for item in load.together]
        parts.append(f"at once: {span(all_to)} to, {span(all_back)} from")
    parts += [BESIDE] if load.beside else []
    links = sorted({f"generation {item.generation} x{item.width}" for item in load.links})
    return "; ".join([*parts, *([f"{' and '.join(links)} under load"] if links else []), "every byte right"])
