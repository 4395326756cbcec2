"""A host that was lost, and may come back: a cut connection, a reboot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from toolkit.errors import UnreachableError

PATIENCE = 300.0  # seconds in which it may come back, a reboot included
RETRY = 2.0  # seconds between two tries


class Absence:
    """How long one host has been away, for a loop that tries again."""

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def begun(self) -> bool:
        """Whether it was lost, and has not been back since."""
        return bool(self._until)

    def end(self) -> None:
        """It is there and at work, however long that takes."""
        self._until = 0.0

    def wait(
        self,
        error: UnreachableError,
        remains: str,
        tell: Callable[[dict[str, Any]], None],
        hint: str = "run the same command again once the host can be reached: it goes on",
    ) -> None:
        """Tell that the connection is made again, and wait a moment before that.

        Args:
            error: how it was lost.
            remains: what becomes of the work meanwhile.
            tell: told of it.
            hint: what to do when it has been away for too long.

        Raises:
            UnreachableError: it has.
        """
        self._until = self._until or time.monotonic() + PATIENCE
        if time.monotonic() > self._until:
            raise UnreachableError(f"{error.message}; {remains}", hint=hint) from error
        tell({"line": f"{error.message}; {remains}, connecting again"})
        time.sleep(RETRY)
