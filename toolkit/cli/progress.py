"""Showing a flow as it runs: plain lines, each with the seconds since the start."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.output import say

if TYPE_CHECKING:
    from toolkit.deploy.watcher import Watcher
    from toolkit.release.journal import Event
    from toolkit.release.request import Outcome


class Lines:
    """Prints steps and their progress on standard error.

    Args:
        verbose: print every line of progress, not only steps and their ends.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._start = time.monotonic()

    def watcher(self) -> Watcher:
        """This, as flows take it."""
        from toolkit.deploy.watcher import Watcher

        return Watcher(step=self.step, line=self.line, event=self.event)

    def step(self, name: str, message: str) -> None:
        """A step begins."""
        say(f"{time.monotonic() - self._start:6.1f}s  {name:<16} {message}")

    def line(self, message: str) -> None:
        """Progress within a step."""
        if self._verbose and message:
            say(f"{'':9}{'':16} {message}")

    def event(self, event: Event) -> None:
        """An event of the transaction."""
        if event.state == "begin":
            self.step(event.step, event.message)
        elif event.state == "failed":
            self.step(event.step, f"FAILED: {event.message}")
        elif event.state == "progress":
            self._progress(event)

    def _progress(self, event: Event) -> None:
        value = event.data.get("value", event.data)
        if not isinstance(value, dict) or value.get("event") != "result":
            return
        status, name = result_words(value), value.get("name", "")
        detail = value.get("detail") or ""
        if self._verbose or status != "passed":
            say(f"{'':9}{'':16} {name}: {status}{' - ' if detail else ''}{detail}")
        else:
            say(f"{'':9}{'':16} {name}: {status}")


def result_words(event: Mapping[str, Any]) -> str:
    """What a check came to, in words, from the event that tells it."""
    status = str(event.get("status", "")).replace("_", " ")
    return status if event.get("counts", True) else f"{status}, which does not count in an experiment"


def show_report(outcome: Outcome) -> None:
    """The acceptance report of the release that was judged, as a table."""
    if outcome.report is None:
        return
    from toolkit.acceptance import load_report
    from toolkit.acceptance.table import print_report

    if outcome.status != "committed":
        say(f"what {outcome.release} came to:")
    # The outcome says why it was refused.
    print_report(load_report(Path(outcome.report)), reasons=False)


def downtime_words(outcome: Mapping[str, Any]) -> str:
    """How long nothing served, behind an outcome's message; "" where nothing had served before."""
    downtime = outcome["seconds"].get("downtime")
    first = outcome["kind"] == "deploy" and outcome["base"] is None
    return "" if downtime is None or first else f" (without a server for {downtime:.1f} s)"


def finish(outcome: Outcome) -> None:
    """Show how a transaction ended, with the last words of a failed server; exit unless it succeeded.

    Raises:
        SystemExit: with the outcome's exit code; 5 rolled back, 6 nothing serves, 1 any other failure.
    """
    if outcome.log:
        say("last lines of the server's output:")
        for line in outcome.log:
            say(f"  | {line}")
    tail = downtime_words(outcome.to_json())
    say(f"{outcome.kind}: {outcome.status.replace('_', ' ')}: {outcome.message}{tail}")
    if outcome.hint:
        say(f"  next: {outcome.hint}")
    if outcome.exit_code:
        sys.exit(outcome.exit_code)
