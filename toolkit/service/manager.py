"""What a service manager offers, whichever runs the unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        gpu_busy: what still holds memory of a GPU, "" for nothing.
    """

    seconds: float
    killed: tuple[Leftover, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    port_busy: str = ""
    gpu_busy: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing of the service is left."""
        return not self.leftovers and not self.port_busy and not self.gpu_busy

    def describe(self) -> str:
        """One line for people."""
        parts = [f"stopped in {self.seconds:.1f} s"]
        if self.killed:
            parts.append("killed what outlived the server: " + ", ".join(map(str, self.killed)))
        if self.leftovers:
            parts.append("still running and not to be killed: " + ", ".join(map(str, self.leftovers)))
        parts += [words for words in (self.port_busy, self.gpu_busy) if words]
        return "; ".join(parts)


class Difference(str):
    """How what runs, or would be started, differs from what was started last, in words.

    Attributes:
        cure: `restart` ends it; `note`: only the record of the start is behind; `hand`: a person's to end.
    """

    cure: Literal["restart", "note", "hand"]

    def __new__(cls, words: str, cure: Literal["restart", "note", "hand"] = "hand") -> Difference:
        """The words, with what ends it."""
        made = super().__new__(cls, words)
        made.cure = cure
        return made


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
        differences: how what runs, or would be started, differs from what was started last.
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
    differences: tuple[Difference, ...] = ()

    @property
    def active(self) -> bool:
        """Whether a process runs or is about to be restarted."""
        return self.state in ("running", "starting")

    def exit_words(self) -> str:
        """How the last main process ended, for people."""
        if self.exit_signal is not None:
            return f"the server was ended by {self.exit_signal}"
        if self.exit_status is None:
            return "the server ended"
        return f"the server ended with status {self.exit_status}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


class ServiceManager(Protocol):
    """Starts and stops one service.

    Attributes:
        kind: name in profiles.
    """

    kind: str

    @property
    def survives_reboot(self) -> bool:
        """Whether the service is started again after a reboot."""

    def check(self, release: Path) -> None:
        """Find what would keep the release in folder `release` from starting, while another one serves.

        Raises:
            ToolkitError: it could not be started; says why.
        """

    def install(self, release: Path) -> None:
        """Have the unit of the release in folder `release` be what a start by hand would start.

        Raises:
            ToolkitError: it cannot be put in place.
        """

    def uninstall(self) -> None:
        """Take away what `install` and `start` put in place of a service that does not run.

        Raises:
            ToolkitError: it cannot be removed.
        """

    def start(self, release: Path) -> None:
        """Start the unit of the release in folder `release`; returns once the process exists.

        Raises:
            ToolkitError: it runs already, or cannot be started; says why.
        """

    def stop(self) -> StopReport:
        """Stop whatever release runs, for good; bounded in time, and reports instead of raising."""

    def status(self) -> ProcessStatus:
        """The state now."""

    def enable(self) -> None:
        """Have it started at boot, where the manager can.

        Raises:
            ToolkitError: it cannot be.
        """

    def disable(self) -> None:
        """Have it not started at boot.

        Raises:
            ToolkitError: it cannot be kept from it.
        """

    def log_tail(self, lines: int = 20, *, since: float | None = None) -> list[str]:
        """The last lines of output since the last start.

        Args:
            lines: how many.
            since: when the start in question was begun, seconds since the epoch. Where it came to nothing
                the last start is one before, whose output is not told. None: the last start, whenever it was.
        """

    def logs(self, lines: int, *, follow: bool, ended: Callable[[], bool]) -> Iterator[str]:
        """The last `lines` lines of output; with `follow` also each further one until `ended` says so.

        Raises:
            ToolkitError: there is no log.
        """
