"""The profiles of the two machines as they are shipped, but for what a test host cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toolkit.profile.loading import load_profile, profile_from_data
from toolkit.profile.schema import Profile

PCIE, B300 = "rtx-pro-6000-pcie-8x", "b300-nvlink-8x"


def data(name: str, *sets: str) -> dict[str, Any]:
    """JSON form of a profile, with `KEY=VALUE` changed."""
    return dict(load_profile(name, sets=("host.min_free_disk=512MiB", *sets)).data)


def profile(name: str, *sets: str) -> Profile:
    """The profile itself."""
    return profile_from_data(data(name, *sets))


def write(folder: Path, *every: dict[str, Any]) -> Path:
    """Write profiles into a folder that DDTOOLKIT_PROFILES can name; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in every:
        (folder / f"{item['name']}.yaml").write_text(yaml.safe_dump(item, sort_keys=False), encoding="utf-8")
    return folder
