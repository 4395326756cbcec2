"""Whoever watches a flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.release.journal import Event


@dataclass(frozen=True, slots=True)
class Watcher:
    """What a flow tells whoever watches it.

    Attributes:
        step: called at the start of a step with its name and a line about it.
        line: called with a line of progress within the step.
        event: called with each event of the transaction.
    """

    step: Callable[[str, str], None]
    line: Callable[[str], None]
    event: Callable[[Event], None]

    def waiting(self, message: str) -> None:
        """The lock is another's: whose, and how long it is waited for."""
        self.step("lock", message)
