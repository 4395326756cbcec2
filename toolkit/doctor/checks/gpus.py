"""The GPUs: which, how many, their memory, and who is on them."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, warning
from toolkit.doctor.parse.smi import Gpu, GpuProcess
from toolkit.doctor.users import HELD_MIB, named
from toolkit.doctor.wanted import Wanted
from toolkit.hardware.catalogue import find_gpu

_MIB_IN_GIB = 1024
_SHOWN = 6
# The driver keeps less than 1% to itself; a card of the next smaller size is more than 10% smaller.
_MEMORY_SLACK = 0.97


def count(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """As many GPUs as the profile uses."""
    there = 0 if facts.smi is None else len(facts.smi.gpus)
    wanted, used = profile.hardware.count, len(facts.used(profile))
    if used >= wanted:
        yield good(f"{there} GPUs")
        return
    absent = [address for address in facts.raw["pci"]["gpus"] if address not in _addresses(facts)]
    seen = f"{used} of {there} GPUs can be used" if used < there else f"{there} GPUs"
    if absent:
        seen += f"; the driver does not have {', '.join(absent)}"
    fix = "look for Xid 79 (fallen off the bus) in dmesg, and for the card in lspci; reseat it or reboot"
    yield bad(seen, f"{wanted} GPUs", fix)


def model(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """They are the model that the profile names, all of them."""
    names = sorted({gpu.name for gpu in facts.used(profile)})
    wanted = profile.hardware.gpu
    known = None if wanted is None else find_gpu(wanted)
    seen = ", ".join(names) or "no GPU"
    if wanted is None or names == [wanted]:
        yield good(seen)
    elif known is not None and set(names) <= set(known.names):
        fix = f"the same chip in another form; set hardware.gpu to {names[0]!r}"
        yield warning(seen, wanted, fix)
    else:
        fix = "deploy the profile for this GPU, or set hardware.gpu to what `nvidia-smi -L` prints"
        yield bad(seen, wanted, fix)


def memory(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Each has the memory that the profile counts with."""
    gpus = facts.used(profile)
    sizes = sorted({gpu.memory_mib for gpu in gpus if gpu.memory_mib is not None})
    known = find_gpu(profile.hardware.gpu or "")
    wanted = profile.hardware.memory_gib or (None if known is None else known.memory_gib)
    seen = " and ".join(f"{size / _MIB_IN_GIB:.1f} GiB" for size in sizes) or "unknown"
    small = [gpu for gpu in gpus if wanted and (gpu.memory_mib or 0) < wanted * _MIB_IN_GIB * _MEMORY_SLACK]
    if wanted and small:
        fix = "the weights and K/V that the profile counts with do not fit: take a profile for this memory"
        yield bad(f"{_which(small)}: {seen}", f"{wanted:.1f} GiB each", fix)
    else:
        yield good(f"{seen} each")


def ecc(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """No GPU has memory errors that are not repaired."""
    gpus, fine = facts.used(profile), True
    for gpu in gpus:
        for result in _errors(gpu):
            fine = False
            yield result
    modes = {gpu.ecc for gpu in gpus} - {None}
    if len(modes) > 1:
        off = _which([gpu for gpu in gpus if gpu.ecc is False])
        yield warning(
            f"ECC is off on {off} and on elsewhere", "one mode", f"nvidia-smi -e 1, then reset {off}"
        )
    elif fine:
        mode = "no ECC" if not modes else "ECC on" if modes.pop() else "ECC off"
        yield good(f"{mode}, no uncorrectable errors")


def _errors(gpu: Gpu) -> Iterator[Result]:
    name = f"GPU {gpu.index} ({gpu.address})"
    if gpu.repair_failed:
        yield bad(
            f"{name}: a memory row could not be replaced", "memory without faults", "have the card replaced"
        )
    elif gpu.repair_pending:
        fix = f"stop what uses it and reset it: nvidia-smi -r -i {gpu.index}; then look again"
        yield bad(f"{name}: a faulty memory row waits for a reset to be replaced", "none pending", fix)
    elif gpu.uncorrectable:
        fix = f"reset it: nvidia-smi -r -i {gpu.index}; if they come again, have the card replaced"
        yield bad(f"{name}: {gpu.uncorrectable} uncorrectable memory errors since it was reset", "none", fix)
    elif gpu.uncorrectable_ever:
        fix = "watch it: more of them mean that the card has to be replaced"
        yield warning(
            f"{name}: {gpu.uncorrectable_ever} uncorrectable memory errors in its life", "none", fix
        )
    if gpu.recovery is not None:
        fix = f"do what it asks for (nvidia-smi -r -i {gpu.index} resets it), and look for Xid lines in dmesg"
        yield bad(f"{name}: the driver asks for {gpu.recovery!r} after a fault", "no recovery action", fix)
    if gpu.ecc is not None and gpu.ecc_pending is not None and gpu.ecc != gpu.ecc_pending:
        after = "on" if gpu.ecc_pending else "off"
        yield warning(
            f"{name}: ECC is {after} after the next reset",
            "no change pending",
            "reset the GPU, or set it back",
        )


def mig(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """No GPU is split into instances."""
    split = [gpu for gpu in facts.used(profile) if gpu.mig]
    if split:
        fix = f"nvidia-smi -mig 0 -i {','.join(str(gpu.index) for gpu in split)}, with nothing on them"
        yield bad(f"MIG is on: {_which(split)}", "whole GPUs", fix)
    else:
        yield good("MIG is off")


def persistence(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The driver keeps each GPU initialised, as the device itself says."""
    off = [gpu for gpu in facts.used(profile) if gpu.persistence is False]
    if off:
        fix = "nvidia-smi -pm 1, which lasts until the next boot"
        if facts.systemd:
            fix = f"systemctl enable --now nvidia-persistenced (or {fix})"
        yield warning(f"persistence mode is off: {_which(off)}", "on", fix)
    else:
        yield good("persistence mode is on")


def processes(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Nobody but the service itself is on the GPUs that it uses."""
    gpus, own = facts.used(profile), set(facts.own)
    strangers: dict[int, list[tuple[Gpu, GpuProcess]]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if process.pid not in own:
                strangers.setdefault(process.pid, []).append((gpu, process))
    # Those that compute first: many may be there, and what is told has to be read.
    order = sorted(strangers.values(), key=lambda found: "C" not in found[0][1].kind)
    for number, found in enumerate(order[:_SHOWN]):
        more = len(order) - _SHOWN if number == _SHOWN - 1 else 0
        yield _stranger(facts, found, f", and {more} more processes" if more > 0 else "")
    mine = any(process.pid in own for gpu in gpus for process in gpu.processes)
    held = [gpu for gpu in gpus if (gpu.used_mib or 0) > HELD_MIB and not gpu.processes]
    if held and not mine:
        sizes = ", ".join(f"GPU {gpu.index} {gpu.used_mib} MiB" for gpu in held)
        fix = "look for containers and for processes that ended badly: fuser -v /dev/nvidia*"
        yield bad(f"memory is held by a process that is not seen from here: {sizes}", "free GPUs", fix)
    elif not strangers:
        yield good("the service's own alone" if mine else "no process on them")


def _stranger(facts: Facts, found: list[tuple[Gpu, GpuProcess]], more: str) -> Result:
    """One process that is not the service's, on whatever GPUs."""
    process = found[0][1]
    about = facts.raw["processes"].get(str(process.pid)) or {}
    sizes = [item.used_mib for _, item in found if item.used_mib is not None]
    size = f", {sum(sizes)} MiB" if sizes else ""
    where = f", in {about['group']}" if about.get("group", "/") != "/" else ""
    seen = f"{named(process, facts)} is on {_which([gpu for gpu, _ in found])}{size}{where}{more}"
    if any("C" in item.kind for _, item in found):
        fix = "end it, or give the service other GPUs by CUDA_VISIBLE_DEVICES"
        return bad(seen, "the service alone", fix)
    return warning(seen, "the service alone", "stop the graphical session on this host")


def _addresses(facts: Facts) -> set[str]:
    return set() if facts.smi is None else {gpu.address for gpu in facts.smi.gpus}


def _which(gpus: list[Gpu]) -> str:
    if len(gpus) == 1:
        return f"GPU {gpus[0].index}"
    return "GPUs " + ", ".join(str(gpu.index) for gpu in gpus)
