"""What a service manager offers, whichever runs the unit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

State = Literal["running", "starting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of the service that outlived its main process.

    Attributes:
        pid: process id.
        name: the kernel's name of it (proc(5), comm); arguments may be confidential and are not shown.
        start: start time in clock ticks after boot.
    """

    pid: int
    name: str
    start: int

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a stop went.

    Attributes:
        seconds: how long it took.
        killed: processes that outlived the main process and were killed.
        leftovers: processes that could not be killed and still run.
        port_busy: what still listens on the service's port, "" for nothing.
    """

    seconds: float
    killed: tuple[Leftover, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    port_busy: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing of the service is left."""
        return not self.leftovers and not self.port_busy

    def describe(self) -> str:
        """One line for people."""
        parts = [f"stopped in {self.seconds:.1f} s"]
        if self.killed:
            parts.append("killed what outlived the server: " + ", ".join(map(str, self.killed)))
        if self.leftovers:
            parts.append("still running and not to be killed: " + ", ".join(map(str, self.leftovers)))
        if self.port_busy:
            parts.append(self.port_busy)
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What a service manager knows about its service.

    Attributes:
        state: `starting` covers the pause before a restart.
        pid: main process, None when there is none.
        since: when the state was entered, seconds since the epoch; None when it was never started.
        restarts: restarts by the manager since the last start.
        exit_status: of the last main process that ended; None when a signal ended it or none ended.
        exit_signal: name of the signal that ended it.
        release: id of the release that was started last.
        supervised: whether the manager will see the end of the process.
        asked_to_stop: whether the last stop was asked for, so that it is to stay stopped.
        message: one line for people.
        leftovers: processes that a stop could not kill.
    """

    state: State
    pid: int | None = None
    since: float | None = None
    restarts: int = 0
    exit_status: int | None = None
    exit_signal: str | None = None
    release: str | None = None
    supervised: bool = True
    asked_to_stop: bool = False
    message: str = ""
    leftovers: tuple[Leftover, ...] = ()

    @property
    def active(self) -> bool:
        """Whether a process runs or is about to be restarted."""
        return self.state in ("running", "starting")

    def exit_words(self) -> str:
        """How the last main process ended, for people."""
        if self.exit_signal is not None:
            return f"the server was ended by {self.exit_signal}"
        return f"the server ended with status {self.exit_status}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class ServiceManager(Protocol):
    """Starts and stops one service.

    Attributes:
        kind: name in profiles.
        survives_reboot: whether the service is started again after a reboot.
    """

    kind: str
    survives_reboot: bool

    def start(self, release: Path) -> None:
        """Start the unit of the release in folder `release`; returns once the process exists.

        Raises:
            ToolkitError: it runs already, or cannot be started; says why.
        """

    def stop(self) -> StopReport:
        """Stop whatever release runs, for good; bounded in time, and reports instead of raising."""

    def status(self) -> ProcessStatus:
        """The state now."""

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines of output since the last start."""
