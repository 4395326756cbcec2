"""What a deploy would write, without touching any host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from toolkit.deploy.locate import layout_of
from toolkit.profile.schema import Profile
from toolkit.provision.requirements import requirements
from toolkit.service.command import unit_for
from toolkit.service.systemd import render_unit

_RELEASE = "20260101T000000Z-00000000"


def render_profile(profile: Profile, form: str, *, systemd_version: int) -> str | list[str] | dict[str, Any]:
    """The unit as systemd reads it, the server's arguments, or the playbooks' settings.

    Args:
        profile: the profile.
        form: `systemd`, `argv` or `ansible`.
        systemd_version: version of the host's systemd, which decides what keys are used.

    Raises:
        ConfigError: a value cannot be written in that form.
    """
    layout = layout_of(profile)
    if form == "ansible":
        return requirements(profile, layout).settings()
    unit = unit_for(
        profile,
        release_dir=layout.service(profile.name).releases / _RELEASE,
        layout=layout,
        python=Path(sys.executable),
    )
    return list(unit.argv) if form == "argv" else render_unit(unit, systemd_version)
