"""What the checks of measurements share: how one ended, what fell, and words for figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, warning
from toolkit.doctor.load.record import figures
from toolkit.doctor.load_result import Load, Run
from toolkit.doctor.wanted import Wanted
from toolkit.hardware.catalogue import find_gpu

# What a lane carries a direction, 10^9 bytes a second: 8b/10b up to generation 2, 128b/130b up to 5, 242 of
# 256 bytes of a flit at 6 (PCI Express Base Specification 6.0).
LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s of a lane
# The same GPUs repeat a rate within a few percent, a latency less well; both are unverified on many hosts.
_FALL, _RISE = 0.8, 1.5
XID = "look for Xid and AER lines in dmesg; a GPU that hangs takes a reset, or the host a reboot"
P2P = (
    "look at the checks acs, iommu and p2p; until it is mended, service.environment.NCCL_P2P_DISABLE=1 goes "
    "through the host's memory, slowly"
)
BESIDE = "beside others that compute there, so that figures are not judged"
FABRIC = "look at the checks fabric, fabric-manager and nvlink"
_LATER = "look for what changed since; the record is {record}: remove it where this is as it should be"


def measured(facts: Facts) -> Load:
    """What was measured; nothing where that was not asked for."""
    return facts.load or Load()


def ended(run: Run, fix: str, more: str = "") -> Iterator[Result]:
    """What is to be said of a measurement that did not come to its end."""
    expected = "an end"
    where = f" while {run.at}" if run.at else ""
    for left in run.left:
        seen = f"process {left.pid} ({left.name}), in state {left.state}, does not end by SIGKILL{where}"
        yield bad(seen, expected, "it waits in the driver: look for Xid lines in dmesg, and reboot the host")
    if run.left or run.end in ("done", "skipped"):
        return
    said = f": {run.said}" if run.said else ""
    words = {
        "slow": f"it did not end in time{where}",
        "silent": f"it hangs{where}",
        "flooded": f"it wrote without end{where}",
        "failed": f"{run.said}{where}",
        "unstarted": f"it cannot be started{said}",
        "ended": f"it ended with {_status(run.status)}{where}{said}",
    }
    yield bad(words[run.end] + more, expected, fix)


def _status(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {-status}"
    return f"status {status}"


def falls(load: Load, kind: str) -> Iterator[Result]:
    """Figures of a kind (`record.figures`) that were better before; the worst of them is shown."""
    worse: list[tuple[float, str]] = []
    for name, value in figures(load).items():
        best = load.earlier.get(name)
        if best is None or not value or not name.startswith(kind):
            continue
        slower = name.endswith(" s")
        ratio = best / value if slower else value / best
        if ratio < (1 / _RISE if slower else _FALL):
            was, now = (
                f"{1e6 * number:.0f} us" if slower else f"{number:.1f} GB/s" for number in (best, value)
            )
            worse.append((ratio, f"{name.removesuffix(' s')}: {now}, {was} before"))
    if worse:
        more = f", and {len(worse) - 1} more" if len(worse) > 1 else ""
        fix = _LATER.format(record=load.record)
        yield warning(f"{min(worse)[1]}{more}", "as it was on these GPUs", fix)


def pcie_carries(profile: Wanted) -> float:
    """10^9 bytes a second of the GPU's own PCIe link; 0 where the GPU is not known."""
    known = find_gpu(profile.hardware.gpu or "")
    return 0.0 if known is None else LANE.get(known.pcie_generation, 0.0) * known.pcie_width


def gpu_list(gpus: Sequence[int]) -> str:
    """GPUs by their numbers."""
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"


def span(rates: Sequence[float]) -> str:
    """The lowest and the highest of them."""
    if not rates:
        return "no"
    low, high = min(rates), max(rates)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def size_words(size: int) -> str:
    """Bytes for people."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
