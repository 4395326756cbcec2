"""All-reduces among the GPUs that compute together."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.checks.measured import (
    BESIDE,
    FABRIC,
    P2P,
    ended,
    falls,
    gpu_list,
    measured,
    pcie_carries,
    size_words,
)
from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.load.record import bus_bandwidth, reductions, smallest
from toolkit.doctor.load_result import Load
from toolkit.doctor.wanted import Wanted

_NCCL = (
    "look at the checks acs and iommu; a NCCL_P2P_LEVEL too high for the host hangs with GPUs at full "
    "utilisation: try PHB"
)


def all_reduce(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """All-reduces among the GPUs that compute together: the sums, their bandwidth and their latency."""
    load = measured(facts)
    if load.reducing.end == "skipped":
        yield skipped(load.why or load.reducing.said or "no two GPUs are free")
        return
    pcie = profile.hardware.interconnect == "pcie"
    results = list(ended(load.reducing, _NCCL if pcie else FABRIC, _blamed(load)))
    for item in load.reduced:
        if item.wrong:
            seen = f"GPU {item.gpu}: {item.wrong} sums of {size_words(item.bytes)} are wrong"
            results.append(bad(seen, "the sum of all ranks", P2P if pcie else FABRIC))
    results += _ways(load, profile)
    if not pcie and not load.beside:
        results += _slow_reduction(load, profile)
    results += falls(load, "all-reduce ")
    yield from results
    if not results:
        yield good(_reduced(load))


def _blamed(load: Load) -> str:
    """Which rank failed first, and what NCCL said."""
    rank = "" if load.faulty is None else f"; the rank of GPU {load.faulty} was the first to fail"
    said = f"; NCCL: {load.warned[0]}" if load.warned else ""
    return rank + said


def _ways(load: Load, profile: Wanted) -> Iterator[Result]:
    """NCCL goes through the host's memory although GPUs could reach each other."""
    others = {way: count for way, count in load.ways.items() if way != "P2P"}
    if not others or profile.service.environment.get("NCCL_P2P_DISABLE") == "1":
        return
    total = sum(load.ways.values())
    told = ", ".join(f"{count} by {way}" for way, count in others.items())
    fix = "look at the checks p2p, acs and topology, and at service.environment.NCCL_P2P_LEVEL"
    yield warning(f"of NCCL's {total} connections {told}", "all by P2P", fix)


def _slow_reduction(load: Load, profile: Wanted) -> Iterator[Result]:
    """With NVLink, all-reduces that PCIe would carry as well."""
    for group, size, seconds in reductions(load):
        if load.reduced and size == max(item.bytes for item in load.reduced) and seconds > 0:
            rate = bus_bandwidth(len(group), size, seconds)
            if 0 < rate <= pcie_carries(profile):
                seen = f"{rate:.1f} GB/s at {size_words(size)} on {gpu_list(group)}: PCIe carries as much"
                yield warning(seen, f"NVLink: more than {pcie_carries(profile):.0f} GB/s", FABRIC)


def _reduced(load: Load) -> str:
    parts = []
    for group in load.groups:
        told = []
        for reduced, size, seconds in reductions(load):
            if reduced != group:
                continue
            time = f"{1e6 * seconds:.0f} us at {size_words(size)}"
            rate = bus_bandwidth(len(group), size, seconds) if seconds > 0 else 0.0
            told.append(time if size == smallest(load) else f"{time} ({rate:.1f} GB/s)")
        parts.append(f"{gpu_list(group)}: {', '.join(told)}")
    if load.ways:
        parts.append("NCCL by " + " and ".join(sorted(load.ways)))
    if load.beside:
        parts.append(BESIDE)
    if not load.whole:
        parts.append("not in the profile's own groups, since others use the rest")
    return "; ".join([*parts, "every sum right"])
