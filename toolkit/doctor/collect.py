"""Gathers a host's facts as they are told there, in parallel; nothing is judged or changed here.

Needs the standard library alone, so that it runs on a host that has nothing of the toolkit yet. No GPU time
or memory is used: the driver is asked, and no CUDA context is made.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.doctor import sandbox
from toolkit.doctor.programs import ask
from toolkit.layout import PYTHON
from toolkit.service import cgroups, ports
from toolkit.service.leftovers import find_leftovers
from toolkit.service.processes import read_stat
from toolkit.service.supervision import read_supervision

_QUICK = 10.0
_WORKERS = 8
_FILES = ("/proc/meminfo", "/proc/cmdline", "/proc/driver/nvidia/version", "/etc/os-release")
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")  # PCI vendor; classes VGA and 3D controller
_LIBRARY = re.compile(r"^lib(?:cuda|nvidia-ml)\.so\.\d+\.[\d.]+$")
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_PID = re.compile(r"<pid>(\d+)</pid>")
_PACKAGES = ("*nvidia*", "cuda-drivers*")
_SHOW = "--showformat=${Package} ${db:Status-Status} ${db:Status-Want} ${Version}\n"


def collect(request: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of this machine.

    Args:
        request: as `toolkit.doctor.request` makes it.

    Returns:
        `commands` (name to `programs.ask`'s answer), `files` (path to text, None where absent), `disks`,
        `shared_memory` (bytes), `port`, `own` (pids of the service), `processes` (pid to name, user and
        group), `root`, `systemd`, `pci`, `libraries`, `modules`, `sandbox` and `weights`; JSON-safe.
    """
    commands = {name: (lambda argv=argv: ask(argv, _QUICK)) for name, argv in _commands(request).items()}
    work: dict[str, Callable[[], Any]] = {f"commands.{name}": call for name, call in commands.items()}
    if request.get("sandbox") is not None:
        work["sandbox"] = lambda: sandbox.look(request["sandbox"])
    if request.get("weights"):
        late: dict[str, Any] = {
            "problem": f"the sources did not answer within {_QUICK:g} s",
            "lacking": [],
            "short": None,
        }
        work["weights"] = _begin(lambda: _weights(request["weights"]), _QUICK, late)
    with ThreadPoolExecutor(_WORKERS) as pool:
        going = {name: pool.submit(call) for name, call in work.items()}
        own = _own(request)
        found: dict[str, Any] = {
            "commands": {},
            "files": {path: _read(path) for path in _FILES},
            "disks": _disks(request["paths"]),
            "shared_memory": _total("/dev/shm"),  # noqa: S108  where NCCL and torch put it
            "port": _port(request["bind"], request["port"]),
            "own": own,
            "root": os.geteuid() == 0,
            "systemd": Path("/run/systemd/system").is_dir(),
            "sandbox": None,
            "weights": None,
        }
        if request["gpus"]:
            found |= {"pci": _pci(), "libraries": _libraries(), "modules": _names("/sys/module")}
        for name, job in going.items():
            part, _, key = name.partition(".")
            if key:
                found[part][key] = job.result()
            else:
                found[part] = job.result()
    smi = found["commands"].get("smi", {}).get("out", "")
    found["processes"] = {pid: _process(int(pid)) for pid in dict.fromkeys(_PID.findall(smi))}
    return found


def _commands(request: Mapping[str, Any]) -> dict[str, list[str]]:
    found = {
        "time": ["timedatectl", "show", "--property=NTP", "--property=NTPSynchronized"],
        "container": ["systemd-detect-virt", "--container"],
        "python": [PYTHON, "--version"],
    }
    if not request["gpus"]:
        return found
    found |= {
        "smi": ["nvidia-smi", "-q", "-x"],
        "lspci": ["lspci", "-D", "-vvv"],
        "packages": ["dpkg-query", "--show", _SHOW, *_PACKAGES],
        "upgrades": ["apt-config", "dump", "APT::Periodic::Unattended-Upgrade"],
    }
    if request["gpus"] > 1:
        found |= {
            "topology": ["nvidia-smi", "topo", "-m"],
            "p2p": ["nvidia-smi", "topo", "-p2p", "r"],
        }
    if request["nvlink"]:
        unit = ["systemctl", "--no-ask-password", "show", "nvidia-fabricmanager.service"]
        found |= {
            "nvlink": ["nvidia-smi", "nvlink", "-s"],
            "fabric_unit": [*unit, "--property=LoadState,ActiveState,SubState,Result"],
            "fabric_manager": ["nv-fabricmanager", "--version"],
        }
    return found


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _disks(paths: Sequence[str]) -> list[dict[str, Any]]:
    """`_disk` of each; a file system that is far away and does not answer keeps nobody waiting."""
    late = {"free": None, "problem": f"the file system did not answer within {_QUICK:g} s"}
    waits = [_begin(partial(_disk, path), _QUICK, {"path": path, **late}) for path in paths]
    return [wait() for wait in waits]


def _disk(path: str) -> dict[str, Any]:
    """Free bytes where `path` lies or would lie; None, and why, where that cannot be told."""
    try:
        place = Path(path).expanduser()
        # Path.exists raises where a folder may not be looked into.
        while not os.path.exists(place) and place != place.parent:  # noqa: PTH110
            place = place.parent
        return {"path": path, "free": shutil.disk_usage(place).free, "problem": ""}
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home
        return {"path": path, "free": None, "problem": str(error)}


def _total(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).total
    return None


def _port(bind: str, port: int) -> dict[str, Any]:
    busy = ports.busy(bind, port)
    holder = ports.listener(port).partition(" ")[0] if busy else ""
    return {"busy": busy, "pid": int(holder) if holder.isdecimal() else None}


def _own(request: Mapping[str, Any]) -> list[int]:
    """Processes of the service itself, which are no strangers on its GPUs and its port."""
    if request.get("unit"):
        answer = ask(["systemctl", "--no-ask-password", "show", request["unit"], "--property=ControlGroup"])
        group = answer["out"].strip().removeprefix("ControlGroup=")
        return [stat.pid for stat in cgroups.members(group)] if group else []
    known = read_supervision(Path(request["supervisor"]))
    if known is None:
        return []
    below = known.supervisor.pid if known.supervisor is not None and known.supervisor.alive() else None
    return [stat.pid for stat in find_leftovers(known.cookie, below=below)]


def _process(pid: int) -> dict[str, str] | None:
    """Name, user and control group of a process; None where it is not to be seen here."""
    stat = read_stat(pid)
    if stat is None:
        return None
    group = (_read(f"/proc/{pid}/cgroup") or "").strip().rpartition(":")[2]
    user = ""
    with contextlib.suppress(OSError, KeyError):
        user = pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    return {"name": stat.name, "user": user, "group": group}


def _pci() -> dict[str, Any]:
    """How the IOMMU treats each NVIDIA GPU (sysfs-kernel-iommu_groups), and which driver has it."""
    devices = Path("/sys/bus/pci/devices")
    found = {}
    for device in sorted(devices.iterdir()) if devices.is_dir() else ():
        vendor, kind = _read(f"{device}/vendor"), _read(f"{device}/class")
        if vendor is None or kind is None or vendor.strip() != _NVIDIA or kind[:6] not in _DISPLAY:
            continue
        driver = device / "driver"
        found[device.name] = {
            "iommu": (_read(f"{device}/iommu_group/type") or "").strip(),
            "driver": driver.resolve().name if driver.exists() else "",
        }
    return {"gpus": found, "iommus": _names("/sys/class/iommu")}


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return []


def _libraries() -> list[str]:
    """File names of the driver's user-space libraries; their ends are its version."""
    names: set[str] = set()
    for folder in map(Path, _LIBRARY_FOLDERS):
        with contextlib.suppress(OSError):
            names |= {item.name for item in folder.iterdir() if _LIBRARY.match(item.name)}
    return sorted(names)


def _weights(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What has to come of the checkpoints, and whether it fits."""
    from toolkit.errors import ToolkitError
    from toolkit.weights import work

    try:
        answer = work.plan({"requests": requests}, lambda _: None)
    except ToolkitError as error:
        return {"problem": error.message, "fix": error.hint, "lacking": [], "short": None}
    unknown = next((item for item in answer["lacking"] if item["problem"]), {"problem": "", "hint": None})
    problem = {"problem": unknown["problem"], "fix": unknown["hint"]}
    return {**problem, "lacking": answer["lacking"], "short": answer["short"]}


def _begin(
    call: Callable[[], dict[str, Any]], limit: float, late: dict[str, Any]
) -> Callable[[], dict[str, Any]]:
    """Begin a call; what waits for it. One that takes longer is left to itself, and `late` is given."""
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(call()), daemon=True).start()
    end = time.monotonic() + limit

    def wait() -> dict[str, Any]:
        try:
            return answers.get(timeout=max(end - time.monotonic(), 0.0))
        except queue.Empty:
            return late

    return wait
