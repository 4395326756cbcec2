"""The machine: disk, memory, port, time."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.parse import host
from toolkit.doctor.wanted import Wanted
from toolkit.layout import PYTHON

_GIB = 1 << 30
# Of the host's memory Python, torch and a CUDA context take about 4 GiB a rank; unverified beyond one GPU.
_RAM_PER_GPU = 4 * _GIB
_RAM_ON_CPU = 1 * _GIB
_SHARED = 1 * _GIB  # NCCL and torch pass data between ranks there; Docker's own 64 MiB do not suffice


def disk(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Room for environment, caches and the checkpoints that have to come."""
    disks = facts.raw["disks"]
    weights = facts.raw["weights"] or {"lacking": [], "short": None, "problem": ""}
    least = profile.host.min_free_disk
    short = [item for item in disks if item["free"] is not None and item["free"] < least]
    unknown = [f"{item['path']}: {item['problem']}" for item in disks if item["free"] is None]
    if short:
        seen = ", ".join(f"{_size(item['free'])} free at {item['path']}" for item in short)
        yield bad(
            seen,
            f"{_size(least)} (host.min_free_disk)",
            "free some there (ddtoolkit prune and ddtoolkit models rm take what is not needed), or keep "
            "less free: host.min_free_disk",
        )
    if weights["short"]:
        yield bad(
            weights["short"],
            "room for the checkpoints",
            "free some space, or remove one: ddtoolkit models rm",
        )
    if unknown:
        yield warning(
            "; ".join(unknown), "free space that can be told", "look at the mount, and at its rights"
        )
    if weights["problem"]:
        fix = weights.get("fix") or "mend the source in the profile"
        yield warning(weights["problem"], "the size of what has to come", fix)
    if not (short or unknown or weights["short"] or weights["problem"]):
        come = [item["bytes"] for item in weights["lacking"] if item["bytes"] is not None]
        more = f"; {_size(sum(come))} of checkpoints have to come" if come else ""
        yield good(f"{_size(min(item['free'] for item in disks))} free{more}")


def ram(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Memory of the host for all ranks."""
    total = host.memory(facts.file("/proc/meminfo")).get("MemTotal")
    gpus = profile.hardware.count if profile.hardware.device == "cuda" else 0
    least = _RAM_PER_GPU * gpus or _RAM_ON_CPU
    if total is None:
        yield skipped("/proc/meminfo tells nothing")
    elif total < least:
        yield bad(_size(total), f"{_size(least)} at least", "a host with more memory")
    else:
        yield good(_size(total))


def shared_memory(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Room in /dev/shm for what ranks pass to each other."""
    del profile
    total = facts.raw["shared_memory"]
    if total is None:
        yield bad("there is no /dev/shm", _size(_SHARED), "mount a tmpfs there")
    elif total < _SHARED:
        yield bad(
            f"{_size(total)} at /dev/shm", f"{_size(_SHARED)} at least", "mount -o remount,size=50% /dev/shm"
        )
    else:
        yield good(_size(total))


def port(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The port is free, or the service's own."""
    found = facts.raw["port"]
    where = f"{profile.service.bind}:{profile.service.port}"
    if not found["busy"]:
        yield good(f"{where} is free")
    elif found["pid"] is not None and found["pid"] in facts.own:
        yield good(f"{where} is the service's own")
    else:
        yield bad(found["busy"], f"{where} free", "stop what listens there, or set service.port to another")


def time(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The clock is synchronised."""
    del profile
    answer = facts.command("time")
    told = host.properties(answer["out"])
    if "NTPSynchronized" not in told:
        yield skipped("timedatectl does not tell")
    elif told["NTPSynchronized"] == "yes":
        yield good("synchronised")
    elif facts.container:
        yield skipped("a container has its host's clock")
    else:
        seen = "not synchronised" + (", and no NTP service is on" if told.get("NTP") == "no" else "")
        yield warning(
            seen, "synchronised: histories and logs of hosts are compared", "timedatectl set-ntp true"
        )


def system(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The distribution that the profile was written for."""
    wanted, seen = profile.host.os, host.release(facts.file("/etc/os-release"))
    if wanted is None or seen is None:
        yield skipped(
            "the profile names no distribution" if wanted is None else "/etc/os-release tells nothing"
        )
    elif seen != wanted:
        fix = "install that distribution, or set host.os to this one; its packages may have other names"
        yield warning(seen, wanted, fix)
    else:
        yield good(seen)


def python(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The interpreter that the engine's environment is made with."""
    wanted, seen = profile.host.python_version, facts.command("python")["out"].removeprefix("Python ").strip()
    if wanted is None or not profile.installs_libraries:
        yield skipped("the profile names an interpreter, or any version")
    elif not seen:
        yield bad(f"there is no {PYTHON}", f"Python {wanted}", "install the distribution's python3")
    elif host.numbers(seen)[:2] != host.numbers(wanted)[:2]:
        fix = f"the locked libraries are for Python {wanted}: take the distribution that has it (host.os)"
        yield bad(f"Python {seen}", f"Python {wanted}", fix)
    else:
        yield good(f"Python {seen}")


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number >> 20} MiB"
