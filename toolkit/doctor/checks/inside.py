"""What the service would see from inside its unit's sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.wanted import Wanted

_NOFILE = 8192  # below it a server of many clients and shards runs out of descriptors
_NINJA = "ninja-build"
_COMPILERS = ("build-essential", "gcc")


def visible(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The sandbox starts, and shows the GPUs and their devices."""
    seen, why = _seen(facts)
    if seen is None:
        if facts.systemd:
            fix = "the host's systemd is too old, or a container that cannot isolate; see `ddtoolkit render`"
            yield bad(f"the unit's sandbox does not start: {why}", "a start", fix)
        else:
            fix = "take a host that is booted with systemd, or set service.manager: process"
            yield bad("systemd does not run this host", "systemd, for service.manager: systemd", fix)
        return
    user = _as(facts, profile)
    if seen["gpus"] is None:
        yield good(f"it starts{user}")
        return
    answer = seen["gpus"]
    inside = sum(line.startswith("GPU ") for line in answer["out"].splitlines())
    outside = 0 if facts.smi is None else len(facts.smi.gpus)
    if inside < outside:
        said = " ".join(f"{answer['out']} {answer['err']}".split())[:200] if inside == 0 else ""
        fix = "look at the modes of /dev/nvidia* (NVreg_DeviceFileMode=0666) and at drop-ins of the unit"
        yield bad(
            f"{inside} GPUs are seen inside{user}{f': {said}' if said else ''}", f"{outside} as outside", fix
        )
    closed = {path: reason for path, reason in seen["devices"].items() if reason}
    for path, reason in closed.items():
        fix = (
            "nvidia-modprobe -c 0 -u makes it, as nvidia-persistenced does; the service itself may not "
            "(NoNewPrivileges)"
        )
        yield bad(f"{path}: {reason} inside{user}", "openable", fix)
    if inside >= outside and not closed:
        yield good(f"{inside} GPUs are seen inside{user}")


def limits(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """Limits as a service gets them, not as a login shell does."""
    seen, why = _seen(facts)
    if seen is None:
        yield skipped(why if facts.systemd else "systemd does not run this host")
        return
    memlock, nofile = seen["memlock"], seen["nofile"]
    fine = True
    if memlock is not None and profile.hardware.device == "cuda":
        fine = False
        fix = "look at drop-ins of the unit and at the container, which may not grant it"
        found = warning if facts.container else bad
        yield found(f"LimitMEMLOCK is {memlock >> 10} KiB inside", "infinity: CUDA pins memory", fix)
    if nofile is not None and nofile < _NOFILE:
        fine = False
        yield warning(
            f"LimitNOFILE is {nofile} inside",
            f"{_NOFILE} at least",
            "raise fs.nr_open and DefaultLimitNOFILE",
        )
    if fine:
        locked = "infinity" if memlock is None else f"{memlock >> 10} KiB"
        yield good(f"MEMLOCK {locked}, NOFILE {'infinity' if nofile is None else nofile}")


def cache(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The service may write where Triton, torch and Hugging Face keep their caches."""
    seen, why = _seen(facts)
    if seen is None:
        yield skipped(why if facts.systemd else "systemd does not run this host")
        return
    folders = seen["folders"]
    wrong = {path: reason for path, reason in folders.items() if reason not in ("", "absent")}
    if wrong and not _stands_in(facts, profile):
        for path in wrong:
            user = profile.system_user
            yield bad(
                f"{path} is not writable for {user}", "the service's own folder", f"chown {user}: {path}"
            )
    elif any(reason == "absent" for reason in folders.values()):
        yield good("its folder is made by the first deploy")
    else:
        yield good(", ".join(folders))


def compilers(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """What kernels are compiled with at the first start is on the unit's own PATH."""
    seen, why = _seen(facts)
    if seen is None:
        yield skipped(why if facts.systemd else "systemd does not run this host")
        return
    programs = seen["programs"]
    comes = {name.partition("=")[0] for name in profile.host.packages}
    results = []
    if not programs.get("ninja") and _NINJA not in comes:
        fix = f"add {_NINJA} to host.packages"
        results.append(bad("no ninja on the unit's PATH", "ninja: flashinfer and torch compile with it", fix))
    if not programs.get("cc") and not comes & set(_COMPILERS):
        results.append(
            bad("no C compiler on the unit's PATH", "cc: Triton compiles with it", "add gcc to host.packages")
        )
    nvcc = next((path for name, path in programs.items() if name.endswith("nvcc") and path), None)
    if nvcc is None:
        fix = "install CUDA's nvcc below /usr/local/cuda, or set service.environment.CUDA_HOME"
        expected = "nvcc: kernels that no wheel brings are compiled with it"
        results.append(warning(f"no nvcc on the unit's PATH ({seen['path']})", expected, fix))
    yield from results
    if not results:
        come = [name for name in ("ninja", "cc") if not programs.get(name)]
        yield good(f"ninja, cc, {nvcc}" + (f" ({' and '.join(come)} with host.packages)" if come else ""))


def _seen(facts: Facts) -> tuple[dict[str, Any] | None, str]:
    looked = facts.raw["sandbox"]
    return (None, "the sandbox was not looked at") if looked is None else (looked["seen"], looked["why"])


def _stands_in(facts: Facts, profile: Wanted) -> bool:
    return bool(facts.raw["sandbox"]["user"] != profile.system_user)


def _as(facts: Facts, profile: Wanted) -> str:
    if not _stands_in(facts, profile):
        return ""
    return f", as {facts.raw['sandbox']['user']} ({profile.system_user} is made by the first deploy)"
