"""Profiles for recorded hosts: what the two machines would be asked, without their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.doctor.recorded import NVLINK, PCIE
from toolkit.profile.loading import profile_from_data
from toolkit.profile.schema import Profile

_MODEL = {
    "target": {"source": "/srv/models/target", "revision": "a"},
    "drafter": {"source": "/srv/models/drafter", "revision": "b"},
}


def pcie_data() -> dict[str, Any]:
    """Eight RTX PRO 6000 over PCIe."""
    return {
        "schema": 1,
        "name": "pcie-8x",
        "hardware": {
            "device": "cuda", "gpu": PCIE, "count": 8, "memory_gib": 95, "interconnect": "pcie",
        },
        "host": {"min_free_disk": "512MiB", "packages": ["ninja-build", "build-essential"]},
        "engine": {"kind": "sglang", "version": "0.5.17", "dtype": "bfloat16"},
        "model": _MODEL,
        "parallelism": {"tp": 8},
        "speculative": {"algorithm": "DDTREE", "budget": 32, "topk_cap": 8},
        "service": {"manager": "systemd", "environment": {"NCCL_P2P_LEVEL": "SYS"}},
    }  # fmt: skip


def b300_data() -> dict[str, Any]:
    """Eight B300 over NVLink."""
    data = pcie_data()
    data["name"] = "b300-8x"
    data["hardware"] |= {"gpu": NVLINK, "memory_gib": 268, "interconnect": "nvlink"}
    data["service"]["environment"] = {}
    return data


def profile(data: dict[str, Any]) -> Profile:
    """The profile of such data."""
    return profile_from_data(data)


def write(folder: Path, *every: dict[str, Any]) -> Path:
    """Write profiles into a folder that DDTOOLKIT_PROFILES can name; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in every:
        (folder / f"{data['name']}.yaml").write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return folder
