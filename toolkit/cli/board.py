"""Showing many hosts at work: one live table on a terminal, else plain lines with the host in front."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from toolkit.cli.output import console, say, table
from toolkit.cli.progress import result_words

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


class Board:
    """What each host is doing now; a context manager.

    Args:
        hosts: names, in the order of the rows.
        verbose: print every line of progress (plain lines only).
    """

    def __init__(self, hosts: Sequence[str], *, verbose: bool) -> None:
        self._verbose = verbose
        self._start = time.monotonic()
        self._guard = threading.Lock()
        self._width = max(map(len, hosts), default=0)
        self._rows = dict.fromkeys(hosts, ("waiting", "", 0.0))
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._verbose:
            from rich.live import Live

            self._live = Live(get_renderable=self._table, console=console(), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, host: str, message: dict[str, Any]) -> None:
        """A message of a host's agent: a step, an event of its transaction, or a line of progress."""
        if "step" in message:
            self._step(host, *message["step"])
        elif "event" in message:
            self._event(host, message["event"])
        elif message.get("line"):
            self._note(host, message["line"], shown=self._verbose)

    def done(self, host: str, word: str) -> None:
        """A host is finished."""
        self._step(host, "done", word)

    def _event(self, host: str, event: dict[str, Any]) -> None:
        if event["state"] == "begin":
            self._step(host, event["step"], event["message"])
        elif event["state"] == "failed":
            self._step(host, event["step"], f"FAILED: {event['message']}")
        elif event["state"] == "progress":
            value = event["data"].get("value", event["data"])
            if isinstance(value, dict) and value.get("event") == "result":
                failed = value.get("status") not in ("passed", None)
                detail = f" - {value['detail']}" if value.get("detail") else ""
                text = f"{value.get('name')}: {result_words(value)}{detail}"
                self._note(host, text, shown=self._verbose or failed)

    def _step(self, host: str, name: str, message: str) -> None:
        now = time.monotonic() - self._start
        with self._guard:
            self._rows[host] = (name, message, now)
            if self._live is None:
                say(f"{now:6.1f}s  {host:<{self._width}}  {name:<12} {message}")

    def _note(self, host: str, text: str, *, shown: bool) -> None:
        with self._guard:
            if self._live is not None:
                step, _, since = self._rows[host]
                self._rows[host] = (step, text, since)
            elif shown:
                say(f"{'':9}{host:<{self._width}}  {'':12} {text}")

    def _table(self) -> Table:
        made = table("host", "step", "for", "", whole=("host", "step"))
        now = time.monotonic() - self._start
        for host, (step, message, since) in self._rows.items():
            lasts = "" if step in ("waiting", "done") else f"{now - since:.0f} s"
            made.add_row(host, step, lasts, message)
        return made
