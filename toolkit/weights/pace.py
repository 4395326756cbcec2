"""How fast bytes may come, and telling how far they have."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from toolkit.spans import in_words

Tell = Callable[[dict[str, Any]], None]

_BURST = 0.25  # seconds' worth of bytes that may come at once
_WINDOW = 30.0  # seconds over which the rate is measured
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Bucket:
    """A token bucket over all connections of a transfer.

    Args:
        rate: bytes a second; None does not limit.
    """

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    @property
    def chunk(self) -> int:
        """Most bytes to read at once, so that a low limit still flows evenly."""
        most = 1 << 20
        return most if self._rate is None else max(1 << 12, min(most, self._rate // 16))

    def take(self, count: int, stop: threading.Event) -> None:
        """Wait until `count` more bytes may come, or until `stop`."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST) + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            stop.wait(wait)


class Meter:
    """Counts what has come and tells it every few seconds, until it is closed; a context manager.

    Args:
        total: bytes in all.
        tell: called with `{"line": ..., "bytes": ..., "total": ..., "rate": ..., "seconds_left": ...}`.
        word: what is done with the bytes.
        every: seconds between two lines.
    """

    def __init__(self, total: int, tell: Tell, *, word: str = "of", every: float = 3.0) -> None:
        self._total = total
        self._tell = tell
        self._word = word
        self._every = every
        self._done = 0
        self._seen: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Meter:
        self._seen.append((time.monotonic(), self._done))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def add(self, count: int) -> None:
        """Count bytes; negative ones have to come again."""
        with self._lock:
            self._done += count

    def have(self, count: int) -> None:
        """Count bytes that were there already; they tell nothing about the speed."""
        with self._lock:
            self._done += count
            self._seen = deque((at, done + count) for at, done in self._seen)

    def state(self) -> dict[str, Any]:
        """Where it stands: `bytes`, `total`, `rate` (bytes a second) and `seconds_left`, None if unknown."""
        with self._lock:
            now, done = time.monotonic(), self._done
            self._seen.append((now, done))
            while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW:
                self._seen.popleft()
            since, before = self._seen[0]
        rate = max(done - before, 0) / (now - since) if now > since else 0.0
        left = (self._total - done) / rate if rate > 0 else None
        return {"bytes": done, "total": self._total, "rate": round(rate), "seconds_left": left}

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            state = self.state()
            self._tell({"line": _line(state, self._word), **state})


def _line(state: dict[str, Any], word: str) -> str:
    share = 100 * state["bytes"] / state["total"] if state["total"] else 100.0
    left = state["seconds_left"]
    estimate = "no byte comes at present" if left is None else f"about {in_words(left)} left"
    amount = f"{size_words(state['bytes'])} {word} {size_words(state['total'])}"
    return f"{amount}, {share:.0f} %, {size_words(state['rate'])}/s, {estimate}"


def size_words(count: float) -> str:
    """Bytes as people read them, in powers of 1000."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
