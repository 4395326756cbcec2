"""Facts as `collect` gives them, of a recorded host, without a host."""

from __future__ import annotations

from typing import Any

from tests.doctor import loads
from tests.doctor.recorded import Site, addresses, files


def raw(site: Site, **changes: Any) -> dict[str, Any]:
    """The facts; `changes` replace some: `command_NAME`, `file_PATH` and `inside_NAME` a single one."""
    text = files(site)

    def said(name: str) -> dict[str, Any]:
        if site.broken is not None and name in ("smi", "topology", "p2p", "nvlink"):
            return answer(site.broken[1], site.broken[0])
        return answer(text[name])

    names = ("smi", "topology", "p2p", "nvlink", "lspci", "packages", "fabric_unit", "fabric_manager")
    commands = {name: said(name) for name in names}
    commands |= {
        "time": answer("NTP=yes\nNTPSynchronized=yes\n"),
        "container": answer("none\n", 1),
        "python": answer("Python 3.12.3\n"),
        "upgrades": answer('APT::Periodic::Unattended-Upgrade "1";\n'),
    }
    inside = {
        "user": "ddtoolkit",
        "path": "/usr/local/bin:/usr/bin",
        "memlock": None,
        "nofile": 1 << 20,
        "programs": {"ninja": "/usr/bin/ninja", "nvcc": "/usr/bin/nvcc", "cc": "/usr/bin/cc"},
        "devices": {"/dev/nvidiactl": "", "/dev/nvidia-uvm": ""},
        "folders": {"/var/cache/ddtoolkit/x": ""},
        "gpus": {"status": 0, "out": text["list"], "err": ""},
    }
    found: dict[str, Any] = {
        "commands": commands,
        "files": {
            "/proc/meminfo": text["meminfo"],
            "/proc/cmdline": text["cmdline"],
            "/proc/driver/nvidia/version": text["version"],
            "/etc/os-release": text["os-release"],
        },
        "disks": [{"path": "/opt/ddtoolkit/services", "free": 1 << 40, "problem": ""}],
        "shared_memory": 1 << 39,
        "port": {"busy": "", "pid": None},
        "own": [],
        "processes": {},
        "root": True,
        "pci": {
            "gpus": {
                address: {"iommu": site.iommu, "driver": "nouveau" if address in site.nouveau else "nvidia"}
                for address in addresses()
            },
            "iommus": ["dmar0"] if site.iommu else [],
        },
        "libraries": [f"libcuda.so.{site.library}", f"libnvidia-ml.so.{site.library}"],
        "modules": list(site.modules),
        "sandbox": {"user": "ddtoolkit", "seen": inside, "why": ""},
        "weights": None,
        "load": loads.healthy(site),
    }
    for name, value in changes.items():
        if name.startswith("command_"):
            commands[name.removeprefix("command_")] = value
        elif name.startswith("file_"):
            found["files"][name.removeprefix("file_")] = value
        elif name.startswith("inside_"):
            inside[name.removeprefix("inside_")] = value
        else:
            found[name] = value
    return found


def answer(out: str = "", status: int | None = 0, err: str = "", why: str = "") -> dict[str, Any]:
    """What a program said."""
    return {"out": out, "err": err, "status": status, "why": why}
