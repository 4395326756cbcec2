"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Attributes:
        check: name of the check, for `--ignore-check`.
        level: `pass`; `warn`: it will serve, but slower or not for long; `fail`: it will not serve as the
            profile says; `skip`: it does not concern the profile or could not be told, and why.
        seen: what there is.
        expected: what there should be.
        fix: the next step; "" where nothing is to be done.
    """

    check: str
    level: Level
    seen: str
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        expected = f"; expected {self.expected}" if self.expected and self.level in ("warn", "fail") else ""
        return f"{self.check}: {self.seen}{expected}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Result:
    """A finding before the check's name is known."""

    level: Level
    seen: str
    expected: str = ""
    fix: str = ""


def good(seen: str, expected: str = "") -> Result:
    """It is as it should be."""
    return Result("pass", seen, expected)


def warning(seen: str, expected: str, fix: str) -> Result:
    """It serves, but slower or not for long."""
    return Result("warn", seen, expected, fix)


def bad(seen: str, expected: str, fix: str) -> Result:
    """It will not serve as the profile says."""
    return Result("fail", seen, expected, fix)


def skipped(why: str) -> Result:
    """It does not concern the profile, or cannot be told."""
    return Result("skip", why)
