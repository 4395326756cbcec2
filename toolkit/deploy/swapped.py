"""Which keys of a release have a value that a swap gave them, and not its deploy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.profile.changes import Change
from toolkit.profile.loading import differences
from toolkit.release.store import Release


@dataclass(frozen=True, slots=True)
class Swapped:
    """Keys that differ from what the last deploy gave them.

    Attributes:
        keys: key paths, sorted.
        deployed: their values by that deploy, JSON form; releases of earlier versions tell none.
    """

    keys: tuple[str, ...]
    deployed: Mapping[str, Any]

    @classmethod
    def of(cls, release: Release) -> Swapped:
        """As they are on record with a release."""
        return cls(release.swapped, release.deployed)

    @classmethod
    def after(cls, release: Release, changes: Sequence[Change], profile: Mapping[str, Any]) -> Swapped:
        """After a swap; a key that has its deployed value again is none any more.

        Args:
            release: whose profile is changed.
            changes: what the swap changes, against that release or what it returns to.
            profile: the changed profile, JSON form.
        """
        deployed = {change.key: change.old for change in changes if change.key not in release.swapped}
        deployed |= release.deployed
        now = {leaf.key: leaf.new for leaf in differences({}, profile)}
        touched = {*release.swapped, *(change.key for change in changes)}
        keys = [key for key in sorted(touched) if key not in deployed or now.get(key) != deployed[key]]
        return cls(tuple(keys), {key: deployed[key] for key in keys if key in deployed})


NOTHING_SWAPPED = Swapped((), {})
