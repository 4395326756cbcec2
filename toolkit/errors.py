"""Every error a user can meet, each with its exit code.

ToolkitError                1   the work was tried and failed
├── ConfigError             2   a profile, inventory, option or value is wrong
├── LockedError             3   someone else holds the lock
├── UnreachableError        4   a host cannot be reached
├── RolledBackError         5   the change was undone; the earlier release serves
├── ServiceDownError        6   the change failed and nothing serves
└── StoppedWatchingError  130   the user interrupted the command
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_DIFFERENT = 7
EXIT_INTERRUPTED = 130


class ToolkitError(Exception):
    """The work was tried and failed.

    Args:
        message: what happened, naming the file, host, key or value.
        hint: the next step for the user; shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration.

    Attributes:
        message: what is wrong and what is allowed.
        key: dotted path of the key, "" for the whole file.
        source: file name, `--set`, or a variable's name.
        line: line in the file, counted from 1; None where there is no file.
        column: column in the file, counted from 1.
        hint: the nearest valid key or value, or the next step.
    """

    message: str
    key: str = ""
    source: str = ""
    line: int | None = None
    column: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        place = ":".join(
            str(part) for part in (self.source, self.line, self.column) if part not in ("", None)
        )
        head = ": ".join(part for part in (place, self.key, self.message) if part)
        return f"{head} ({self.hint})" if self.hint else head


class ConfigError(ToolkitError):
    """A profile, inventory, option or value is wrong. Carries every problem found, not the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | str, *, hint: str | None = None) -> None:
        self.problems = [Problem(problems)] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(map(str, self.problems)), hint=hint)


class LockedError(ToolkitError):
    """Someone else holds the lock; the message says who, since when, and how to release it."""

    exit_code = 3


class UnreachableError(ToolkitError):
    """A host cannot be reached."""

    exit_code = 4


class RolledBackError(ToolkitError):
    """The change was undone; the earlier release serves again."""

    exit_code = 5


class StoppedWatchingError(ToolkitError):
    """The user interrupted the command; the message says whether anything goes on without it."""

    exit_code = EXIT_INTERRUPTED


class ServiceDownError(ToolkitError):
    """The change failed and could not be undone: nothing serves."""

    exit_code = 6
