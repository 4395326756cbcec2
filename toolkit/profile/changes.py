"""One changed key of a profile; apart from the schema, since code that only records changes needs no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs; JSON forms, None where the key is not set."""

    key: str
    old: Any = None
    new: Any = None


def shown(value: Any) -> str:
    """A value as people read it in a diff."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
