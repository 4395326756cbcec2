"""The profiles of the two machines as they are shipped, but for what a test host cannot have."""

from __future__ import annotations

from toolkit.doctor.wanted import Wanted, wanted_of
from toolkit.profile.loading import load_profile

PCIE, B300 = "rtx-pro-6000-pcie-8x", "b300-nvlink-8x"


def profile(name: str, *sets: str) -> Wanted:
    """What a profile wants, with `KEY=VALUE` changed."""
    return wanted_of(load_profile(name, sets=("host.min_free_disk=512MiB", *sets)).profile)
