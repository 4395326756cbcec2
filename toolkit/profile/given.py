"""How a deploy was asked for its values, kept with the release: the same words ask for the same again."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.profile.lookup import is_path


@dataclass(frozen=True, slots=True)
class Given:
    """What a profile was resolved from, as it was typed.

    Attributes:
        profile: its file; "" where it was found by its name.
        overlays: names or files, in order.
        sets: `key.path=value`, in order.
    """

    profile: str = ""
    overlays: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """The options of a command that lays the same on the profile."""
        words = [word for overlay in self.overlays for word in ("--overlay", overlay)]
        return words + [word for item in self.sets for word in ("--set", item)]

    def deploy(self, service: str) -> str:
        """The command that deploys the service so again."""
        return f"ddtoolkit {shlex.join(self.words(service))}"

    def words(self, service: str) -> list[str]:
        """The same without the program, not quoted."""
        return ["deploy", "profile", self.profile or service, *self.options]

    def lays_the_same(self, other: Given) -> bool:
        """Whether both lay the same on a profile; an overlay is the same by name and by file."""
        ours, theirs = ([_name(item) for item in given.overlays] for given in (self, other))
        return ours == theirs and sorted(self.sets) == sorted(other.sets)

    def lost(self, other: Given, changed: Collection[str]) -> tuple[str, ...]:
        """Options of this that another one lacks, such as `--overlay ep8`, where that shows in its values.

        Args:
            other: what is asked for now.
            changed: keys whose values differ.
        """
        if not changed:
            return ()
        laid = set(map(_name, other.overlays))
        overlays = [item for item in self.overlays if _name(item) not in laid]
        asked = {_key(item) for item in other.sets}
        sets = [item for item in self.sets if _key(item) not in asked and _shows(_key(item), changed)]
        return tuple(shlex.join(("--overlay", item)) for item in overlays) + tuple(
            shlex.join(("--set", item)) for item in sets
        )

    def sets_key(self, key: str) -> bool:
        """Whether a `--set` says what a key's value is."""
        return any(_within(key, _key(item)) for item in self.sets)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Given:
        """Read back; nothing where it was not recorded, or is damaged."""
        if not isinstance(value, dict):
            return cls()
        profile = value.get("profile")
        return cls(
            profile if isinstance(profile, str) else "",
            _texts(value.get("overlays")),
            _texts(value.get("sets")),
        )

    @classmethod
    def of(cls, name_or_path: str, overlays: Collection[Path], sets: Collection[str]) -> Given:
        """What a command was given."""
        profile = name_or_path if is_path(name_or_path) else ""
        return cls(profile, tuple(map(str, overlays)), tuple(sets))


def _name(overlay: str) -> str:
    """The name that finds an overlay, whether it or the file is given; it may hold dots."""
    path = Path(overlay)
    return path.stem if is_path(path.name) else path.name


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def _shows(key: str, changed: Collection[str]) -> bool:
    """Whether a key, a part of it, or what it is a part of, is among those that differ."""
    return any(_within(item, key) or _within(key, item) for item in changed)


def _within(key: str, whole: str) -> bool:
    return key == whole or key.startswith((f"{whole}.", f"{whole}["))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()
