"""What a host is asked for a profile."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from toolkit.build.for_profile import lock_for
from toolkit.build.libraries.install import interpreter
from toolkit.doctor.wanted import wanted_of
from toolkit.layout import PYTHON, Layout
from toolkit.profile.memory.shapes import shapes
from toolkit.profile.schema import Profile
from toolkit.release.locate import layout_of
from toolkit.service.command import unit_for
from toolkit.service.systemd import render_unit, unit_name
from toolkit.service.unit import Unit
from toolkit.weights.wanted import requests as weights_of

PROGRAMS = ("ninja", "nvcc", "cc")
NVCC = "/usr/local/cuda/bin/nvcc"  # where CUDA is looked for without CUDA_HOME
DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
COPY_BYTES = 64 << 20
COPY_SECONDS = 0.4
# The smallest tells the latency; that of a verify step comes between them.
REDUCE_SIZES = (8 << 10, 1 << 20, 16 << 20, 64 << 20)
REDUCE_ITERATIONS = 200
LOAD_LIMIT = 300.0  # seconds of the copies, and again of the all-reduces
LOAD_SILENCE = 90.0  # torch takes the longest step, from a slow disk
# Every key of the sandbox is known to this systemd; what it does not know could not be asked for.
_SYSTEMD = 252
# Of [Service], what is about the server's own life and not about what it sees.
_NOT_SANDBOX = (
    "Type", "ExecStart", "Environment", "WorkingDirectory", "User", "LoadCredential", "TimeoutStartSec",
    "TimeoutStopSec", "KillMode", "Restart", "RestartSec", "LogRateLimitIntervalSec", "LogRateLimitBurst",
    "CacheDirectory", "CacheDirectoryMode",
)  # fmt: skip


def examination(
    profile: Profile,
    *,
    weights: bool = True,
    ignored: Collection[str] = (),
    load: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `examine` takes on the host, JSON-safe.

    Args:
        profile: the profile.
        weights: whether to ask the sources of checkpoints what has to come; a plan has done so already.
        ignored: names of checks whose failures do not count.
        load: what to measure, as `load_request` makes it; None: nothing.

    Raises:
        ConfigError: a value of the profile cannot be written in a unit.
    """
    asked = _request(profile, weights=weights)
    return {
        "request": asked,
        "wanted": wanted_of(profile).to_json(),
        "ignored": sorted(ignored),
        "load": load,
    }


def load_request(profile: Profile, *, disruptive: bool = False, look: bool = False) -> dict[str, Any] | None:
    """What `load_on` takes on the host, JSON-safe; None for a profile without GPUs.

    Args:
        profile: the profile.
        disruptive: load GPUs that are in use, too.
        look: only tell who is on them.
    """
    if profile.hardware.device != "cuda":
        return None
    layout = layout_of(profile)
    paths = layout.service(profile.name)
    lock = lock_for(profile)
    own = [] if profile.host.python is None else [profile.host.python]
    unit = _unit(profile, layout)
    return {
        "look": look,
        "disruptive": disruptive,
        "device": "cuda",
        "pythons": own if lock is None else [str(interpreter(layout.environments / lock.folder_name))],
        "service": profile.name,
        "root": None if layout.root is None else str(layout.root),
        "record": str(paths.state / "load.json"),
        "group": profile.parallelism.tp,
        "bytes": COPY_BYTES,
        "seconds": COPY_SECONDS,
        "sizes": sorted({*REDUCE_SIZES, _step_bytes(profile)}),
        "iterations": REDUCE_ITERATIONS,
        "limit": LOAD_LIMIT,
        "silence": LOAD_SILENCE,
        "environment": {"LANG": "C.UTF-8", **unit.environment},
        "properties": list(_properties(unit)) if profile.service.manager == "systemd" else None,
        "user": unit.user,
    }


def _step_bytes(profile: Profile) -> int:
    """Bytes of the all-reduce of one verify step of one request: bf16 hidden states, a row a tree node."""
    shape = shapes().get(profile.model.target.shape or "")
    spec = profile.speculative
    rows = {"DDTREE": spec.budget + 1, "DFLASH": spec.block_size, "NONE": 1}[spec.algorithm]
    return REDUCE_SIZES[0] if shape is None else rows * shape.hidden * 2


def _request(profile: Profile, *, weights: bool) -> dict[str, Any]:
    """What `collect` asks."""
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


def _unit(profile: Profile, layout: Layout) -> Unit:
    release = layout.service(profile.name).releases / "doctor"
    return unit_for(profile, release_dir=release, layout=layout, python=Path(profile.host.python or PYTHON))


def _sandbox(profile: Profile, layout: Layout) -> dict[str, Any]:
    unit = _unit(profile, layout)
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
