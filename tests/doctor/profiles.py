"""The profiles of the two machines as they are shipped, but for what a test host cannot have."""

from __future__ import annotations

from toolkit.profile.loading import load_profile
from toolkit.profile.schema import Profile

PCIE, B300 = "rtx-pro-6000-pcie-8x", "b300-nvlink-8x"


def profile(name: str, *sets: str) -> Profile:
    """A profile with `KEY=VALUE` changed."""
    return load_profile(name, sets=("host.min_free_disk=512MiB", *sets)).profile
