"""What a rule has against a profile."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.profile.nodes import KeyPath


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule has against a profile.

    Attributes:
        message: what does not go together, and why.
        paths: the keys that it rests on; the first is the one to change.
        hint: the next step.
        fatal: the profile is refused; otherwise it is a warning.
    """

    message: str
    paths: tuple[KeyPath, ...]
    hint: str | None = None
    fatal: bool = True


def error(message: str, *keys: str | KeyPath, hint: str | None = None) -> Finding:
    """A finding that refuses the profile; the first of `keys` (dotted, or a path) is the one to change."""
    return Finding(message, _paths(keys), hint)


def doubt(message: str, *keys: str | KeyPath, hint: str | None = None) -> Finding:
    """A finding that only warns."""
    return Finding(message, _paths(keys), hint, fatal=False)


def _paths(keys: tuple[str | KeyPath, ...]) -> tuple[KeyPath, ...]:
    return tuple(tuple(key.split(".")) if isinstance(key, str) else key for key in keys)
