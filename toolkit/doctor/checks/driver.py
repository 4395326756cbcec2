"""The driver: that it answers, its library, CUDA, nouveau, and what could replace it."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.doctor.facts import Facts
from toolkit.doctor.finding import Result, bad, good, skipped, warning
from toolkit.doctor.parse import host
from toolkit.doctor.wanted import Wanted
from toolkit.hardware.catalogue import oldest_driver

_SHOWN = 4
_VERSION = "/proc/driver/nvidia/version"
_INSTALL = (
    "ddtoolkit hosts prepare NAME installs it, on hosts of an inventory; or install it by hand, and reboot"
)
_HOLD = "apt-mark hold {names}: an upgrade would replace the library under the loaded module"


def driver(facts: Facts, _: Wanted) -> Iterator[Result]:
    """Driver answers, and its kernel module and library have one version."""
    answer = facts.command("smi")
    module = host.module_version(facts.file(_VERSION))
    libraries = host.library_versions(facts.raw.get("libraries", ()))
    said = " ".join(f"{answer['out']} {answer['err']}".split())[:300]
    if "version mismatch" in said:
        library = ", ".join(libraries) or host.nvml_version(said) or "another"
        fix = "reboot, or unload and load the nvidia modules; then apt-mark hold the driver's packages"
        yield bad(f"kernel module {module or 'unknown'}, library {library}", "one version of both", fix)
    elif answer["why"] == "missing":
        yield bad("there is no nvidia-smi", "NVIDIA's driver", _INSTALL)
    elif answer["why"] == "slow":
        fix = (
            "look for Xid lines with: dmesg | grep -i xid; a GPU that hangs takes a reboot. Without "
            "persistence mode many GPUs take as long: systemctl start nvidia-persistenced"
        )
        yield bad("nvidia-smi does not end", "an answer within 10 s", fix)
    elif facts.smi is None:
        loaded = f"module {module} is loaded" if module else "the nvidia module is not loaded"
        fix = "modprobe nvidia, and look at: dmesg | grep -i -e nvrm -e nvidia"
        yield bad(f"nvidia-smi ended with status {answer['status']}: {said}; {loaded}", "an answer", fix)
    else:
        yield from _versions(facts.smi.driver, module, libraries)


def _versions(driver: str | None, module: str | None, libraries: list[str]) -> Iterator[Result]:
    module = module or driver
    others = [version for version in libraries if version != module]
    if module is not None and others:
        seen = f"kernel module {module}, library {', '.join(libraries)}"
        fix = "reboot, and remove the libraries of the other version; then apt-mark hold the packages"
        found = bad if module not in libraries else warning
        yield found(seen, "one version of both", fix)
    else:
        yield good(f"driver {driver}")


def cuda(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The driver is new enough for the CUDA version that the engine is built for."""
    hardware = profile.hardware
    version = None if facts.smi is None else facts.smi.driver
    newest = None if facts.smi is None else facts.smi.cuda
    floor = hardware.min_driver or oldest_driver(hardware.cuda or "")
    if version is not None and floor is not None and host.numbers(version) < host.numbers(floor):
        fix = f"install driver {floor} or newer, together with its fabric manager, and reboot"
        yield bad(f"driver {version}", f"driver {floor} at least", fix)
    elif (
        newest is not None
        and hardware.cuda is not None
        and host.numbers(newest) < host.numbers(hardware.cuda)
    ):
        fix = f"install a driver that runs CUDA {hardware.cuda}, and reboot"
        yield bad(f"driver {version} runs CUDA up to {newest}", f"CUDA {hardware.cuda}", fix)
    else:
        yield good(f"driver {version} runs CUDA up to {newest}")


def nouveau(facts: Facts, _: Wanted) -> Iterator[Result]:
    """Nouveau is not loaded beside or instead of NVIDIA's driver."""
    bound = [
        address
        for address, gpu in facts.raw["pci"]["gpus"].items()
        if gpu["driver"] in ("nouveau", "nova_core")
    ]
    if "nouveau" in facts.modules or bound:
        seen = "module nouveau is loaded" + (f" and has {', '.join(bound)}" if bound else "")
        fix = "write `blacklist nouveau` to /etc/modprobe.d/nouveau.conf, run update-initramfs -u, reboot"
        yield bad(seen, "NVIDIA's driver alone", fix)
    else:
        yield good("nouveau is not loaded")


def packages(facts: Facts, profile: Wanted) -> Iterator[Result]:
    """The driver's packages are held, and no pinned one changes the branch unseen."""
    answer = facts.command("packages")
    if answer["why"]:
        yield skipped("no dpkg on this host")
        return
    installed = host.driver_packages(answer["out"])
    yield from _branches(installed, profile)
    loose = [item.name for item in installed if not item.held]
    if not installed and facts.command("smi")["why"] == "missing":
        yield skipped("there is no driver")
    elif not installed:
        yield good("the driver came without Debian packages; no upgrade replaces it")
    elif not loose:
        yield good(f"{len(installed)} packages of the driver are held")
    else:
        itself = " and apt upgrades by itself" if host.unattended(facts.command("upgrades")["out"]) else ""
        seen = f"{', '.join(loose[:_SHOWN])}{' and others' if len(loose) > _SHOWN else ''} not held{itself}"
        yield warning(seen, "the driver's packages on hold", _HOLD.format(names=" ".join(loose)))


def _branches(installed: list[host.Package], profile: Wanted) -> Iterator[Result]:
    """A pinned package of another driver branch: its module is loaded by the next boot only."""
    now = {item.name: item.version for item in installed}
    for package in profile.host.packages:
        name, _, pinned = package.partition("=")
        if not pinned or name not in now:
            continue
        before, after = host.numbers(now[name])[:1], host.numbers(pinned)[:1]
        if before and after and before != after:
            seen = f"{name} goes from branch {before[0]} to {after[0]}"
            fix = "reboot after the deploy's provisioning, before the service is started"
            yield warning(seen, "no change of the driver's branch", fix)
