"""How the GPUs are joined: topology, peer-to-peer, NVLink and its fabric, NUMA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.parse import host, topology
from toolkit.doctor.wanted import Wanted
from toolkit.hardware.catalogue import find_gpu

_SHOWN = 4
_FIX = (
    "systemctl restart nvidia-fabricmanager; on NVLink 5 it needs nvlsm and the module ib_umad "
    "(modprobe ib_umad)"
)
# NCCL's names of distances (NCCL_P2P_LEVEL); its PHB reaches as far as NODE of nvidia-smi.
_NCCL_REACH = {"LOC": -1, "NVL": 0, "PIX": 1, "PXB": 2, "PHB": 4, "SYS": 5}


def topology_of(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Each two GPUs are joined as the profile says."""
    used = [gpu.index for gpu in facts.used(profile)]
    pairs = facts.topology.between(used)
    if not pairs:
        yield warning("nvidia-smi topo -m tells nothing", "how the GPUs are joined", "run it by hand")
        return
    words = Counter(pairs.values())
    seen = ", ".join(f"{number} pairs {word}" for word, number in sorted(words.items()))
    if profile.hardware.interconnect == "nvlink":
        yield from _all_nvlink(pairs, seen)
        return
    farthest = max(words, key=topology.distance)
    level = profile.service.environment.get("NCCL_P2P_LEVEL", "").upper()
    if level in _NCCL_REACH and topology.distance(farthest) > _NCCL_REACH[level]:
        expected = "all pairs within NCCL_P2P_LEVEL: farther ones go through the host's memory"
        fix = "set service.environment.NCCL_P2P_LEVEL to SYS if peer-to-peer works there, or leave it unset"
        yield warning(f"{seen}; NCCL_P2P_LEVEL is {level}", expected, fix)
    else:
        yield good(seen)


def _all_nvlink(pairs: Mapping[tuple[int, int], str], seen: str) -> Iterator[Result]:
    apart = {pair: word for pair, word in pairs.items() if not word.startswith("NV")}
    if apart:
        fix = "look at the fabric manager and at nvidia-smi nvlink -s; a GPU without links takes a reset"
        yield bad(_pairs(apart), "NVLink between all GPUs", fix)
    elif len(set(pairs.values())) > 1:
        fix = "look at nvidia-smi nvlink -s for links that are down"
        yield bad(seen, "as many links between all GPUs", fix)
    else:
        yield good(seen)


def p2p(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Each GPU may read every other one's memory."""
    if profile.service.environment.get("NCCL_P2P_DISABLE") == "1":
        yield skipped("the profile turns peer-to-peer off (NCCL_P2P_DISABLE)")
        return
    used = [gpu.index for gpu in facts.used(profile)]
    pairs = facts.p2p.between(used)
    refused = {pair: word for pair, word in pairs.items() if word != "OK"}
    if not pairs:
        yield warning("nvidia-smi topo -p2p r tells nothing", "OK between all GPUs", "run it by hand")
    elif refused:
        legend = "CNS: chipset, GNS: GPU, TNS: topology not supported, DR: disabled, NS: not supported"
        fix = (
            f"{legend}. Look at ACS, the IOMMU and Resizable BAR; to go on without, slowly, set "
            "service.environment.NCCL_P2P_DISABLE=1"
        )
        yield bad(_pairs(refused), "OK between all GPUs", fix)
    else:
        yield good(f"OK between all {len(used)} GPUs")


def nvlink(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Every GPU has as many active links as the others."""
    links = topology.parse_nvlink(facts.command("nvlink")["out"])
    used = [gpu.index for gpu in facts.used(profile)]
    # Some models have more places for links than links: what counts is that all have the same.
    active = {gpu: sum(speed is not None for speed in links.get(gpu, ())) for gpu in used}
    known = find_gpu(profile.hardware.gpu or "")
    most = max([0 if known is None else known.nvlinks, *active.values()])
    fewer = {gpu: number for gpu, number in active.items() if number < most}
    if not any(active.values()):
        fix = "start nvidia-fabricmanager; look for NVLink lines in dmesg"
        yield bad("no active NVLink", "links on every GPU", fix)
    elif fewer:
        seen = ", ".join(f"GPU {gpu}: {number} links" for gpu, number in fewer.items())
        fix = "reset the GPU (nvidia-smi -r -i N); links that stay down are a fault of the board"
        yield bad(seen, f"{most} links on every GPU", fix)
    else:
        yield good(f"{most} active links on every GPU")


def fabric(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The NVLink fabric is up, without which CUDA gives error 802 although nvidia-smi looks well."""
    gpus = facts.used(profile)
    states = {gpu.index: gpu.fabric_state for gpu in gpus if gpu.fabric_state is not None}
    if not states:
        yield skipped("these GPUs are in no NVLink fabric")
        return
    waiting = {gpu: state for gpu, state in states.items() if state != "Completed"}
    failed = {gpu.index: gpu.fabric_status for gpu in gpus if gpu.fabric_status not in (None, "Success")}
    if waiting:
        state = next(iter(waiting.values()))
        which = "all GPUs" if len(waiting) == len(gpus) else f"GPU {', '.join(map(str, waiting))}"
        yield bad(
            f"fabric state {state!r} on {which}{_why(facts)}",
            "'Completed'; CUDA gives error 802 until then",
            _FIX,
        )
    elif failed:
        seen = ", ".join(f"GPU {gpu}: {status}" for gpu, status in failed.items())
        yield bad(f"fabric status {seen}", "'Success'", _FIX)
    else:
        yield good("completed")


def _why(facts: Facts) -> str:
    unit = host.properties(facts.command("fabric_unit")["out"])
    found = []
    if unit.get("ActiveState") not in (None, "active"):
        found.append(f"the fabric manager is {unit['ActiveState']}")
    if "ib_umad" not in facts.modules:
        found.append("module ib_umad is not loaded")
    return f" ({', '.join(found)})" if found else ""


def fabric_manager(facts: Facts, _: Wanted) -> Iterator[Result]:
    """The fabric manager runs, and is the driver's own version."""
    if not facts.systemd:
        yield skipped("systemd does not run this host; `fabric` has what the fabric manager came to")
        return
    unit = host.properties(facts.command("fabric_unit")["out"])
    version = host.fabric_manager_version(facts.command("fabric_manager")["out"])
    driver = None if facts.smi is None else facts.smi.driver
    if unit.get("LoadState") != "loaded":
        fix = f"install nvidia-fabricmanager of version {driver}; the service's unit requires it"
        yield bad("nvidia-fabricmanager.service is not installed", "it runs", fix)
    elif unit.get("ActiveState") != "active":
        state, result = unit.get("ActiveState"), unit.get("Result", "")
        seen = (
            f"nvidia-fabricmanager.service is {state}{f', {result}' if result not in ('', 'success') else ''}"
        )
        fix = "systemctl enable --now nvidia-fabricmanager; see journalctl -u nvidia-fabricmanager"
        yield bad(seen, "it runs", fix)
    elif version is None or driver is None:
        yield good("it runs; its version is not told")
    elif version != driver:
        fix = f"install nvidia-fabricmanager {driver} and hold it together with the driver"
        yield bad(f"fabric manager {version}, driver {driver}", "one version of both", fix)
    else:
        yield good(f"it runs, version {version}")


def numa(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The kernel knows which NUMA node each GPU is at."""
    used = [gpu.index for gpu in facts.used(profile)]
    nodes = {gpu: facts.topology.numa.get(gpu, "N/A") for gpu in used}
    unknown = [gpu for gpu, node in nodes.items() if node == "N/A"]
    known = sorted({node for node in nodes.values() if node != "N/A"})
    if unknown and known:
        seen = f"GPU {', '.join(map(str, unknown))} at no known NUMA node"
        yield warning(seen, "a node for every GPU", "update the BIOS; it does not tell where the slot is")
    elif unknown:
        yield good("one NUMA node")
    else:
        parts = [f"{sum(node == other for other in nodes.values())} GPUs at node {node}" for node in known]
        yield good(", ".join(parts))


def _pairs(pairs: Mapping[tuple[int, int], str]) -> str:
    shown = [f"GPU {a} and {b}: {word}" for (a, b), word in list(pairs.items())[:_SHOWN]]
    more = f", and {len(pairs) - _SHOWN} more pairs" if len(pairs) > _SHOWN else ""
    return ", ".join(shown) + more
