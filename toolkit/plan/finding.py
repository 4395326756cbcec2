"""One drift, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Kind = Literal["config", "host", "files", "unit", "process", "server"]
# How the next deploy ends a drift. `planned`: it is a reason of the plan anyway. `build`: the engine's code
# is made anew, with a release. `release`: a new release. `restart`: the current release is started anew.
# `repair`: set right on the spot, while the server runs. `hand`: not at all, a person has to.
Mend = Literal["planned", "build", "release", "restart", "repair", "hand"]


@dataclass(frozen=True, slots=True)
class Drift:
    """Something that is not as it was deployed.

    Attributes:
        kind: what part of the host it is about.
        subject: the path, key, unit or process.
        found: what is there, in words that also say what should be.
        fix: the next step by hand.
        expected: what should be there.
        seen: what is there.
        mend: how the next deploy ends it.
        repair: sets it right, for `repair` alone; raises OSError or ToolkitError.
    """

    kind: Kind
    subject: str
    found: str
    fix: str
    expected: str
    seen: str
    mend: Mend = "hand"
    repair: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.subject}: {self.found}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "repair"}
