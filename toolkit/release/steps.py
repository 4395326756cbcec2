"""Steps of a transaction: each is journalled before its effect and after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.release.journal import Event, Journal, read_journal

# Steps in which the server itself runs or fails to: its last lines belong to the failure.
_STARTING = "start_"
_SERVING = (_STARTING, "ready")
_MAX_LINE = 500  # characters of a line of output that the journal takes; it has limited space


class StepFailedError(Exception):
    """A step did not succeed.

    Attributes:
        reason: what happened, for people.
        hint: the next step.
    """

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class NotBegunError(StepFailedError):
    """A step could not be put into the journal, so that its effect was not tried."""


class Steps:
    """Writes the journal of one transaction and measures its steps.

    Attributes:
        before: events of an earlier process of the same transaction.
        seconds: duration by step.
        log: the server's last lines at the first failure.
    """

    def __init__(self, folder: Path, log_tail: Callable[[float | None], list[str]]) -> None:
        self.before = read_journal(folder)
        self.seconds: dict[str, float] = {}
        self.log: tuple[str, ...] = ()
        self._journal = Journal(folder)
        self._log_tail = log_tail
        self._written: list[Event] = []
        self._begin = time.monotonic()
        self._down_since: float | None = None
        # When the last start was begun, by whichever process; its output begins there, if it has any.
        begun = [event for event in self.before if event.state == "begin"]
        self._started = next(
            (event.time for event in reversed(begun) if event.step.startswith(_STARTING)), None
        )
        self._started_here: float | None = None  # by the monotonic clock

    @contextmanager
    def step(self, name: str, message: str, *, announced: bool = False) -> Iterator[dict[str, Any]]:
        """Journal a step around its effect, which may add details to the yielded object.

        Args:
            name: of the step.
            message: one line for people.
            announced: do nothing where the journal cannot be written, since nobody could take it back later.

        Raises:
            NotBegunError: it had to be announced and could not be.
            StepFailedError: the effect raised a ToolkitError or an OSError.
        """
        begin = time.monotonic()
        event = Event(name, "begin", message)
        if name.startswith(_STARTING):
            self._started, self._started_here = event.time, begin
        why = self._write(event)
        if announced and why is not None:
            raise NotBegunError(f"the journal cannot be written: {why.strerror}")
        data: dict[str, Any] = {}
        try:
            yield data
        except (ToolkitError, OSError) as error:
            failure = _failure(error)
            self._measure(name, begin)
            if name.startswith(_SERVING):
                lines = [line[:_MAX_LINE] for line in self._log_tail(self._start())]
                self.log = self.log or tuple(lines)
                data["log"] = lines
            self._write(Event(name, "failed", failure.reason, data=data))
            raise failure from error
        self._measure(name, begin)
        self._write(Event(name, "done", message, data={**data, "seconds": self.seconds[name]}))

    @contextmanager
    def attempt(self, name: str, message: str) -> Iterator[dict[str, Any]]:
        """A step whose failure is journalled and otherwise stands in nothing's way."""
        with contextlib.suppress(StepFailedError), self.step(name, message) as data:
            yield data

    def begun(self, *, also_now: bool = False) -> list[str]:
        """Names of the steps that an earlier process began, in order; with `also_now` this one's, too."""
        events = [*self.before, *self._written] if also_now else self.before
        return [event.step for event in events if event.state == "begin"]

    def reason(self) -> str:
        """Why an earlier process had to go back, as the beginning of a sentence; "" where it had not."""
        failed = [event.message for event in self.before if event.state == "failed"]
        return f"{failed[0]}; " if failed else ""

    def said(self, step: str, key: str, *, default: bool) -> bool:
        """A flag that a step of this transaction put into its details, in whichever process."""
        for event in (*self.before, *self._written):
            if event.step == step and key in event.data:
                return bool(event.data[key])
        return default

    def went_down(self) -> None:
        """The service is being stopped: downtime begins, unless it has already."""
        if self._down_since is None:
            self._down_since = time.monotonic()

    def came_up(self) -> None:
        """A real token came: downtime ends; a change that is undone has two such times."""
        if self._down_since is not None:
            lasted = time.monotonic() - self._down_since
            self.seconds["downtime"] = round(self.seconds.get("downtime", 0.0) + lasted, 3)
            self._down_since = None

    def note(self, step: str, message: str) -> None:
        """Journal a remark."""
        self._write(Event(step, "progress", message))

    def progress(self, step: str, value: dict[str, Any]) -> None:
        """Journal what a long step says about itself; not worth waiting for the disk."""
        with contextlib.suppress(OSError):
            event = Event(step, "progress", str(value.get("message", "")), data=value)
            self._journal.write(event, durable=False)

    def end(self, message: str, outcome: dict[str, Any]) -> None:
        """Journal the outcome, the last event there is."""
        self._write(Event("outcome", "done", message, data=outcome))
        self._journal.close()

    def total(self) -> float:
        """Seconds since this process took the transaction up."""
        return round(time.monotonic() - self._begin, 3)

    def _start(self) -> float | None:
        """When the last start was begun; the clock may have been set since: the earlier of both times."""
        if self._started is None or self._started_here is None:
            return self._started
        return min(self._started, time.time() - (time.monotonic() - self._started_here))

    def _measure(self, name: str, begin: float) -> None:
        self.seconds[name] = round(time.monotonic() - begin, 3)

    def _write(self, event: Event) -> OSError | None:
        # Space is reserved; should the disk fail all the same, serving matters more than the record.
        self._written.append(event)
        try:
            self._journal.write(event)
        except OSError as error:
            return error
        return None


@contextmanager
def failing() -> Iterator[None]:
    """Let an error between two steps count as the failure of a step.

    Raises:
        StepFailedError: the body raised a ToolkitError or an OSError.
    """
    try:
        yield
    except (ToolkitError, OSError) as error:
        raise _failure(error) from error


def _failure(error: ToolkitError | OSError) -> StepFailedError:
    if isinstance(error, ToolkitError):
        return StepFailedError(error.message, error.hint)
    place = f"{error.filename}: " if error.filename else ""
    return StepFailedError(f"{place}{error.strerror or error}")
