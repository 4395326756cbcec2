"""What a host is asked for a profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.deploy.locate import layout_of
from toolkit.layout import PYTHON, Layout
from toolkit.profile.schema import Profile
from toolkit.service.command import unit_for
from toolkit.service.systemd import render_unit, unit_name
from toolkit.service.unit import Unit
from toolkit.weights.wanted import requests as weights_of

PROGRAMS = ("ninja", "nvcc", "cc")
NVCC = "/usr/local/cuda/bin/nvcc"  # where CUDA is looked for without CUDA_HOME
DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
# Every key of the sandbox is known to this systemd; what it does not know could not be asked for.
_SYSTEMD = 252
# Of [Service], what is about the server's own life and not about what it sees.
_NOT_SANDBOX = (
    "Type", "ExecStart", "Environment", "WorkingDirectory", "User", "LoadCredential", "TimeoutStartSec",
    "TimeoutStopSec", "KillMode", "Restart", "RestartSec", "LogRateLimitIntervalSec", "LogRateLimitBurst",
    "CacheDirectory", "CacheDirectoryMode",
)  # fmt: skip


def request_for(profile: Profile, *, weights: bool = True) -> dict[str, Any]:
    """The request for `collect`, JSON-safe.

    Args:
        profile: the profile.
        weights: whether to ask the sources of checkpoints what has to come; a plan has done so already.

    Raises:
        ConfigError: a value of the profile cannot be written in a unit.
    """
    layout = layout_of(profile)
    paths = layout.service(profile.name)
    systemd = profile.service.manager == "systemd"
    gpus = profile.hardware.count if profile.hardware.device == "cuda" else 0
    return {
        "gpus": gpus,
        "nvlink": profile.hardware.interconnect == "nvlink",
        "bind": profile.service.bind,
        "port": profile.service.port,
        "paths": [str(path) for path in (layout.services, layout.models, layout.caches)],
        "unit": unit_name(profile.name) if systemd else None,
        "supervisor": str(paths.supervisor),
        "sandbox": _sandbox(profile, layout) if systemd else None,
        "weights": weights_of(profile) if weights else [],
    }


def _sandbox(profile: Profile, layout: Layout) -> dict[str, Any]:
    paths = layout.service(profile.name)
    python = Path(profile.host.python or PYTHON)
    unit = unit_for(profile, release_dir=paths.releases / "doctor", layout=layout, python=python)
    gpus = unit.gpus > 0
    home = unit.environment.get("CUDA_HOME")
    nvcc = (NVCC,) if home is None else (f"{home}/bin/nvcc",)
    return {
        "properties": list(_properties(unit)),
        "environment": {"LANG": "C.UTF-8", **unit.environment},
        "user": unit.user,
        "probe": {
            "gpus": gpus,
            "programs": [*PROGRAMS, *nvcc] if gpus else [],
            "devices": list(DEVICES) if gpus else [],
            "folders": [unit.cache],
        },
    }


def _properties(unit: Unit) -> Iterator[str]:
    """The sandbox as it is rendered into the unit file; the cache's folder is used only if it is there."""
    section = ""
    for line in render_unit(unit, _SYSTEMD).splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and line.partition("=")[0] not in _NOT_SANDBOX:
            yield line
    yield f"ReadWritePaths=-{unit.cache}"
