"""Facts of the kernel and the distribution: /proc, systemd's `Key=value`, dpkg."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_MODULE_VERSION = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", re.MULTILINE)
_LIBRARY_VERSION = re.compile(r"\.so\.(\d+\.\d[\d.]*)$")
_NVML_VERSION = re.compile(r"NVML library version:\s*([\d.]+)")
_FABRIC_MANAGER = re.compile(r"version is\s*:\s*([\d.]+)")
_DRIVER_PACKAGE = re.compile(r"^(?:nvidia-driver|nvidia-headless|libnvidia-compute|nvidia-open|cuda-drivers)")


@dataclass(frozen=True, slots=True)
class Package:
    """A Debian package that is installed."""

    name: str
    held: bool
    version: str


def module_version(text: str | None) -> str | None:
    """Version of the loaded kernel module (/proc/driver/nvidia/version); None where it is not loaded."""
    match = _MODULE_VERSION.search(text or "")
    return None if match is None else match[1]


def library_versions(names: Sequence[str]) -> list[str]:
    """Versions of the driver's libraries by their file names, `libcuda.so.580.95.05`."""
    return sorted({match[1] for name in names if (match := _LIBRARY_VERSION.search(name))})


def nvml_version(text: str) -> str | None:
    """The library's version in nvidia-smi's complaint about a mismatch; it leaves out the last part."""
    match = _NVML_VERSION.search(text)
    return None if match is None else match[1]


def fabric_manager_version(text: str) -> str | None:
    """Of `nv-fabricmanager --version`."""
    match = _FABRIC_MANAGER.search(text)
    return None if match is None else match[1]


def properties(text: str) -> dict[str, str]:
    """`Key=value` lines of systemctl and timedatectl show."""
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def memory(text: str | None) -> dict[str, int]:
    """/proc/meminfo in bytes by name."""
    found = {}
    for line in (text or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0]] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return found


def driver_packages(text: str) -> list[Package]:
    """Installed packages that bring the driver's kernel or user-space part."""
    found = []
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) == 4 and words[1] == "installed" and _DRIVER_PACKAGE.match(words[0]):
            found.append(Package(words[0], words[2] == "hold", words[3]))
    return found


def unattended(text: str) -> bool:
    """Whether apt upgrades by itself (apt-config dump)."""
    match = re.search(r'Unattended-Upgrade "(\d+)"', text)
    return match is not None and match[1] != "0"


def release(text: str | None) -> str | None:
    """`ubuntu-24.04` of /etc/os-release; None where it does not tell."""
    found = {key: value.strip('"') for key, value in properties(text or "").items()}
    return f"{found['ID']}-{found['VERSION_ID']}" if "ID" in found and "VERSION_ID" in found else None


def numbers(version: str) -> tuple[int, ...]:
    """A version for comparing: (580, 95, 5) of `580.95.05`; what is no number ends it."""
    found = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)
