"""What came of a command on each host, and of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import EXIT_DONE, ConfigError, ToolkitError

# The worst first: what is down, what was undone, what failed, what is locked, what was not reached.
_ORDER = (6, 5, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class HostResult:
    """What came of a command on one host.

    Attributes:
        host: its name.
        value: what the command gave, None after an error.
        error: what went wrong, None if nothing did.
        skipped: why it was not tried, "" if it was.
        code: exit code of what it gave; an error has its own.
    """

    host: str
    value: Any = None
    error: ToolkitError | None = None
    skipped: str = ""
    code: int = EXIT_DONE

    @property
    def exit_code(self) -> int:
        """Exit code of this host."""
        return self.code if self.error is None else self.error.exit_code

    @property
    def ok(self) -> bool:
        """Whether it was tried and succeeded."""
        return not self.skipped and self.exit_code == EXIT_DONE

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        if self.error is not None:
            problems = (
                [str(item) for item in self.error.problems] if isinstance(self.error, ConfigError) else []
            )
            said = {"error": self.error.message, "hint": self.error.hint, "problems": problems}
            return {"ok": False, "exit_code": self.exit_code, **said}
        if self.skipped:
            return {"ok": False, "exit_code": EXIT_DONE, "skipped": self.skipped}
        return {"ok": self.ok, "exit_code": self.exit_code, "result": self.value}


def worst(results: Sequence[HostResult]) -> int:
    """The exit code of a command on many hosts."""
    codes = {result.exit_code for result in results}
    return next((code for code in _ORDER if code in codes), max(codes, default=EXIT_DONE))


def to_json(results: Sequence[HostResult]) -> dict[str, Any]:
    """All of it as a JSON object."""
    hosts = {result.host: result.to_json() for result in results}
    return {"ok": all(result.ok for result in results), "exit_code": worst(results), "hosts": hosts}
