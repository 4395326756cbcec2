"""Whoever watches a flow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from toolkit.release import controller
from toolkit.release.controller import Session
from toolkit.release.journal import Event
from toolkit.release.locate import Deployed


def _nobody(*_: Any) -> None:
    """Hears what nobody watches."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """What a flow tells whoever watches it; by default nobody does.

    Attributes:
        step: called at the start of a step with its name and a line about it.
        line: called with a line of progress within the step.
        event: called with each event of the transaction.
    """

    step: Callable[[str, str], None] = _nobody
    line: Callable[[str], None] = _nobody
    event: Callable[[Event], None] = _nobody

    def waiting(self, message: str) -> None:
        """The lock is another's: whose, and how long it is waited for."""
        self.step("lock", message)

    def hold(self, service: Deployed, command: str, *, wait: float = 0.0) -> AbstractContextManager[Session]:
        """Hold a service's lock, watching who is waited for and what is recovered; see `controller.hold`."""
        return controller.hold(
            service.layout, service.name, command, wait=wait, on_event=self.event, on_wait=self.waiting
        )

    def reserve(
        self,
        service: Deployed,
        command: str,
        *,
        wait: float = 0.0,
        deploys: bool = False,
        stopping: bool = False,
    ) -> AbstractContextManager[None]:
        """The same over several uses of `hold`; see `controller.reserve`."""
        return controller.reserve(
            service.layout,
            service.name,
            command,
            wait=wait,
            on_event=self.event,
            on_wait=self.waiting,
            deploys=deploys,
            stopping=stopping,
        )


NOBODY = Watcher()
