"""The checkpoints of a profile: which are fetched, and where they lie then."""

from __future__ import annotations

from toolkit.layout import Layout
from toolkit.profile.schema import Checkpoint, Profile
from toolkit.profile.source import Source

_ROLES = ("target", "drafter")


def sources_of(profile: Profile) -> dict[str, Source]:
    """The sources of a profile that are fetched, by role."""
    found = {}
    for role in _ROLES:
        checkpoint: Checkpoint | None = getattr(profile.model, role)
        if checkpoint is not None and checkpoint.remote is not None:
            found[role] = checkpoint.remote
    return found


def located(profile: Profile, layout: Layout) -> Profile:
    """The profile with folders on the host in place of sources that are fetched there."""
    folders = {
        role: Checkpoint(source=str(layout.models / source.folder))
        for role, source in sources_of(profile).items()
    }
    if not folders:
        return profile
    return profile.model_copy(update={"model": profile.model.model_copy(update=folders)})
