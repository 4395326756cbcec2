"""One drift."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["config", "host", "files", "unit", "process", "server"]


@dataclass(frozen=True, slots=True)
class Drift:
    """Something that is not as it was deployed.

    Attributes:
        kind: what part of the host it is about.
        subject: the path, key, unit or process.
        found: what is there, and what should be.
        fix: the next step.
    """

    kind: Kind
    subject: str
    found: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)
