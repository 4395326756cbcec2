"""Keys that neither the server nor its judgement depends on: a change of them alone restarts nothing.

They say what a host must have, where things come from and how fast, what is told of the profile, and how many
releases are kept. A change of one is put on record with the release that serves.
"""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.profile.changes import Change

RECORDED = (
    "description",
    "hardware.driver",
    "hardware.min_driver",
    "host.download_files",
    "host.download_rate",
    "host.journal_max_size",
    "host.min_free_disk",
    "host.model_hub",
    "host.os",
    "host.packages",
    "host.time_sync",
    "host.wheelhouse",
    "service.keep_releases",
)


def recorded(key: str) -> bool:
    """Whether a change of this key restarts nothing."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in RECORDED)


def restarts(changes: Iterable[Change]) -> bool:
    """Whether one of the changes takes a restart."""
    return any(not recorded(change.key) for change in changes)
