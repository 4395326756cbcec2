"""Ansible module: what a host has of NVIDIA's driver, and what it lacks of what is asked for."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: gpu_host
short_description: Compare a host with the driver and boot settings that are asked for
description:
  - Reads dpkg, the apt sources that are configured, the loaded modules and the kernel's command line.
  - Changes nothing; tells what to install, what to hold, and why a reboot is needed.
options:
  branch:
    description: Driver branch, the first number of its version.
    type: int
    required: true
  min_driver:
    description: Oldest driver that will do.
    type: str
    default: ""
  driver_packages:
    description: Names of the driver's package; an installed one, else the first that a source has.
    type: list
    elements: str
    required: true
  fabric_packages:
    description: Names of the fabric manager's package; it gets the driver's version.
    type: list
    elements: str
    default: []
  packages:
    description: Other packages, of any version.
    type: list
    elements: str
    default: []
  kernel_arguments:
    description: Arguments that the running kernel should have.
    type: list
    elements: str
    default: []
  module_options:
    description: Options that loaded modules should have.
    type: list
    elements: str
    default: []
  files:
    description: Files to look for. Each call of a module costs a quarter of a second.
    type: list
    elements: str
    default: []
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: It changes nothing.
"""

EXAMPLES = r"""
- name: Read what there is of the driver
  gpu_host:
    branch: 580
    driver_packages: [nvidia-driver-580-server-open]
"""

RETURN = r"""
install:
  description: Packages to install, with a version where it matters.
  returned: always
  type: list
  elements: str
remove:
  description: Packages of other fabric managers.
  returned: always
  type: list
  elements: str
hold:
  description: Installed packages that an upgrade would replace under the loaded driver.
  returned: always
  type: list
  elements: str
release:
  description: Packages of the driver that are held; apt would not replace them.
  returned: always
  type: list
  elements: str
unknown:
  description: What no configured source has.
  returned: always
  type: list
  elements: str
unfinished:
  description: Packages whose installation was cut off, and what else dpkg has to take up again.
  returned: always
  type: list
  elements: str
unfinished_driver:
  description: Whether one of them is of the driver.
  returned: always
  type: bool
touches:
  description: Whether that changes the driver or the fabric manager.
  returned: always
  type: bool
replaces:
  description: Why installing takes the driver away under what uses it; empty if it does not.
  returned: always
  type: str
stale:
  description: What was generated before its configuration changed, of grub and initramfs.
  returned: always
  type: list
  elements: str
driver:
  description: Version of the installed driver; empty without one.
  returned: always
  type: str
loaded:
  description: Version of the loaded module; empty without one.
  returned: always
  type: str
files:
  description: Which of the files that were asked for are there.
  returned: always
  type: list
  elements: str
reboot:
  description: Why a reboot is needed, a line each.
  returned: always
  type: list
  elements: str
steps:
  description: What is to be done, a line each.
  returned: always
  type: list
  elements: str
"""

MODULES = Path("/sys/module")
COMMAND_LINE = Path("/proc/cmdline")
GRUB, GRUB_CONFIG = Path("/etc/default/grub.d/90-ddtoolkit.cfg"), Path("/boot/grub/grub.cfg")
MODPROBE, INITRAMFS = (
    Path("/etc/modprobe.d/ddtoolkit-gpu.conf"),
    Path("/boot/initrd.img-" + os.uname().release),
)

DPKG_UPDATES = Path("/var/lib/dpkg/updates")  # what a dpkg that was killed had not yet put into its status

_VERSION = re.compile(r"(?:\d+:)?(\d+(?:\.\d+)+)")
_FAMILY = re.compile(
    r"(lib)?nvidia-|nvlsm$|cuda-drivers|xserver-xorg-video-nvidia|linux-(modules|objects)-nvidia-"
)
_NOT_FAMILY = re.compile(r"(lib)?nvidia-container")
_FABRIC = re.compile(r"nvidia-fabricmanager(-\d+)?$")
_PREBUILT = re.compile(r"linux-modules-nvidia-\d+(?:-server)?(?:-open)?-([a-z][a-z0-9.-]*)$")
_KERNEL = ("linux-{}", "linux-image-{}", "linux-headers-{}")


def upstream(version: str) -> str:
    """NVIDIA's own version in a package's: "580.95.05" of "580.95.05-0ubuntu1"."""
    match = _VERSION.match(version)
    return match[1] if match else ""


def numbers(version: str) -> tuple[int, ...]:
    """A version for comparing."""
    return tuple(int(part) for part in version.split(".") if part)


def output(*command: str) -> str:
    """What a command prints; "" where it fails."""
    environment = dict(os.environ, LC_ALL="C.UTF-8")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
    except OSError:
        return ""


def installed_packages() -> dict[str, tuple[str, bool]]:
    """Version and whether it is held, by name, of each installed package."""
    shape = "--showformat=${db:Status-Status} ${db:Status-Want} ${Package} ${Version}\n"
    lines = (line.split(" ") for line in output("dpkg-query", "--show", shape).splitlines())
    return {words[2]: (words[3], words[1] == "hold") for words in lines if words[0] == "installed"}


def unfinished_packages() -> list[str]:
    """Names of packages that are neither installed nor gone, as a dpkg leaves them that was cut off."""
    shape = "--showformat=${db:Status-Status} ${db:Status-Eflag} ${Package}\n"
    lines = (line.split(" ") for line in output("dpkg-query", "--show", shape).splitlines())
    whole = ("installed", "config-files", "not-installed")
    return [name for status, flag, name in lines if status not in whole or flag != "ok"]


def offered(name: str) -> list[str]:
    """Versions of a package that the configured sources have, newest first."""
    return [
        words[1].strip()
        for line in output("apt-cache", "madison", name).splitlines()
        if len(words := line.split("|")) > 2
    ]


def of_driver(name: str) -> bool:
    """Whether a package is of NVIDIA's driver."""
    return _FAMILY.match(name) is not None and _NOT_FAMILY.match(name) is None


def read(path: Path) -> str:
    """A small file's text, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _newer(source: Path, made: Path) -> bool:
    return not made.exists() or made.stat().st_mtime_ns < source.stat().st_mtime_ns


class Host:
    """The host against what is asked for; collects `install`, `remove`, `unknown` and `steps`."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.packages = installed_packages()
        self.loaded = read(MODULES / "nvidia" / "version")
        self.install: list[str] = []
        self.remove: list[str] = []
        self.unknown: list[str] = []
        self.steps: list[str] = []
        self.replaces = ""

    def driver(self) -> str:
        """Choose the driver's version; what is there stays while it is of the branch and new enough."""
        names = self.asked["driver_packages"]
        there = next((name for name in names if name in self.packages), None)
        if there is not None and self._good(version := upstream(self.packages[there][0])):
            return version
        for name in names:
            for full in offered(name):
                if self._good(version := upstream(full)):
                    self._add(name, full, "driver")
                    now = self.loaded
                    if now and now != version:
                        why = "what uses the GPUs fails from then on"
                        self.replaces = f"driver {version} replaces {now}, which is loaded: {why}"
                    return version
        wanted = f"branch {self.asked['branch']}"
        if self.asked["min_driver"]:
            wanted += f", {self.asked['min_driver']} or newer"
        self.unknown.append(f"no configured apt source has a driver of {wanted} ({' or '.join(names)})")
        return ""

    def fabric_manager(self, driver: str) -> None:
        """The fabric manager in exactly the driver's version, and no other one."""
        names = self.asked["fabric_packages"]
        if not names or not driver:
            return
        right = [name for name in names if upstream(self.packages.get(name, ("",))[0]) == driver]
        chosen = right[0] if right else None
        for name in () if right else names:
            full = next((version for version in offered(name) if upstream(version) == driver), None)
            if full is not None:
                chosen = name
                self._add(name, full, "fabric manager")
                if self.loaded and self.loaded != driver:
                    said = f"fabric manager {driver} does not go with the loaded driver {self.loaded}"
                    self.replaces = self.replaces or said
                break
        if chosen is None:
            self.unknown.append(
                f"no configured apt source has {' or '.join(names)} {driver}, the driver's version"
            )
            return
        self.remove = [name for name in self.packages if _FABRIC.match(name) and name != chosen]
        self.steps += [
            f"remove {name} {self.packages[name][0]}: another fabric manager" for name in self.remove
        ]

    def others(self) -> None:
        """Packages of which any version will do."""
        for name in self.asked["packages"]:
            if name in self.packages:
                continue
            if offered(name):
                self.install.append(name)
                self.steps.append(f"install {name}")
            else:
                self.unknown.append(f"no configured apt source has {name}")

    def family(self) -> set[str]:
        """Packages of the driver, with the kernel's where its modules come ready built."""
        found = set(filter(of_driver, self.packages))
        for match in filter(None, map(_PREBUILT.match, list(found))):
            found |= {name.format(match[1]) for name in _KERNEL} & set(self.packages)
        return found

    def hold(self) -> list[str]:
        """Packages of the driver that are not held."""
        return sorted(name for name in self.family() if not self.packages[name][1])

    def release(self) -> list[str]:
        """Packages of the driver that are held, where something of it is replaced or removed."""
        return sorted(name for name in self.family() if self.packages[name][1]) if self.touches() else []

    def unfinished(self) -> list[str]:
        """What a dpkg that was cut off has left to do."""
        found = unfinished_packages()
        if (
            not found
            and DPKG_UPDATES.is_dir()
            and any(path.name.isdigit() for path in DPKG_UPDATES.iterdir())
        ):
            return ["dpkg was interrupted"]
        return found

    def touches(self) -> bool:
        """Whether the driver or the fabric manager is installed, replaced or removed."""
        return bool(self.remove) or any("=" in item for item in self.install)

    def reboot(self) -> Iterator[str]:
        """Why the host has to boot again."""
        driver = self.installed_driver()
        if driver and self.loaded and driver != self.loaded:
            yield f"the module of driver {self.loaded} is loaded, installed is {driver}"
        elif driver and not self.loaded:
            yield f"driver {driver} is installed, but its module is not loaded"
        if (MODULES / "nouveau").is_dir():
            yield "nouveau is loaded; it is blacklisted from the next boot on"
        line = read(COMMAND_LINE).split()
        for argument in self.asked["kernel_arguments"]:
            if argument not in line:
                yield f"{argument} is not on the kernel's command line"
        for option in self.asked["module_options"]:
            module, _, setting = option.partition(" ")
            name, _, value = setting.partition("=")
            now = read(MODULES / module / "parameters" / name)
            now = {"Y": "1", "N": "0"}.get(now, now)  # as the kernel shows booleans
            if now and now != value:
                yield f"module {module} was loaded with {name}={now}, not {value}"

    def stale(self) -> Iterator[str]:
        """What has to be generated anew: its configuration is newer."""
        if GRUB.exists() and _newer(GRUB, GRUB_CONFIG):
            yield "grub"
        if MODPROBE.exists() and INITRAMFS.exists() and _newer(MODPROBE, INITRAMFS):
            yield "initramfs"

    def installed_driver(self) -> str:
        """Version of the driver that is installed; empty without one."""
        versions = (
            upstream(self.packages[name][0])
            for name in self.asked["driver_packages"]
            if name in self.packages
        )
        return next(versions, "")

    def _good(self, version: str) -> bool:
        floor = self.asked["min_driver"]
        right = numbers(version)[:1] == (self.asked["branch"],)
        return right and (not floor or numbers(version) >= numbers(floor))

    def _add(self, name: str, version: str, what: str) -> None:
        self.install.append(f"{name}={version}")
        before = self.packages.get(name, ("",))[0]
        self.steps.append(
            f"{what}: {name} {before} -> {version}" if before else f"{what}: install {name} {version}"
        )


def main() -> None:
    """Run the module."""
    lists = ("driver_packages", "fabric_packages", "packages", "kernel_arguments", "module_options", "files")
    spec = {name: {"type": "list", "elements": "str", "default": []} for name in lists}
    spec["driver_packages"] = {"type": "list", "elements": "str", "required": True}
    spec |= {"branch": {"type": "int", "required": True}, "min_driver": {"type": "str", "default": ""}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    host = Host(module.params)
    driver = host.driver()
    host.fabric_manager(driver)
    host.others()
    hold, reboot, unfinished = host.hold(), list(host.reboot()), host.unfinished()
    host.steps += [f"finish what was cut off: {', '.join(unfinished)}"] if unfinished else []
    if hold:
        host.steps.append(f"hold {', '.join(hold)}")
    host.steps += [f"reboot: {reason}" for reason in reboot]
    module.exit_json(
        changed=False,
        install=host.install,
        remove=host.remove,
        hold=hold,
        release=host.release(),
        unknown=host.unknown,
        unfinished=unfinished,
        unfinished_driver=any(of_driver(name) for name in unfinished),
        touches=host.touches(),
        replaces=host.replaces,
        stale=list(host.stale()),
        driver=host.installed_driver(),
        loaded=host.loaded,
        files=[path for path in module.params["files"] if Path(path).exists()],
        reboot=reboot,
        steps=host.steps,
    )


if __name__ == "__main__":
    main()
