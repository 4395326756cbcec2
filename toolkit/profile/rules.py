"""Rules across keys: combinations that cannot run, each with its reason, and doubtful ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.profile.schema import Profile
from toolkit.profile.shape import KeyPath


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


def check(profile: Profile) -> list[Finding]:
    """Everything that the rules have against `profile`, errors and warnings."""
    return [finding for rule in _RULES for finding in rule(profile)]


def _keys(*names: str) -> tuple[KeyPath, ...]:
    return tuple(tuple(name.split(".")) for name in names)


def _tree(profile: Profile) -> Iterator[Finding]:
    spec = profile.speculative
    if spec.algorithm == "DDTREE" and spec.budget < spec.block_size - 1:
        yield Finding(
            f"{spec.budget} is less than block_size - 1 = {spec.block_size - 1}: the chain does not fit",
            _keys("speculative.budget", "speculative.block_size", "speculative.algorithm"),
        )


_RULES: tuple[Callable[[Profile], Iterator[Finding]], ...] = (_tree,)
