"""Work on many hosts: at the same time, or in turn with a stop at the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.fleet.results import HostResult

Work = Callable[[str], Any]
# Exit code of a value that is no error, such as a deploy that was rolled back.
Grade = Callable[[Any], int]


def _good(_: Any) -> int:
    return 0


def at_once(names: Sequence[str], work: Work, *, limit: int, grade: Grade = _good) -> list[HostResult]:
    """Run `work` on every host, at most `limit` at a time; one host's failure is no other's.

    Returns:
        A result for each name, in the order of `names`.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(limit, len(names) or 1))) as pool:
        return list(pool.map(lambda name: _attempt(name, work, grade), names))


def in_turn(names: Sequence[str], work: Work, *, batch: int, grade: Grade = _good) -> list[HostResult]:
    """Run `work` on `batch` hosts at a time; after a failure nothing new is begun.

    Returns:
        A result for each name, in the order of `names`.
    """
    stop = threading.Event()
    first: list[str] = []
    guard = threading.Lock()

    def one(name: str) -> HostResult:
        if stop.is_set():
            return HostResult(name, skipped=f"not begun, since {first[0]} failed")
        result = _attempt(name, work, grade)
        if not result.ok:
            with guard:
                first.append(name)
            stop.set()
        return result

    with ThreadPoolExecutor(max_workers=max(1, batch)) as pool:
        return list(pool.map(one, names))


def _attempt(name: str, work: Work, grade: Grade) -> HostResult:
    try:
        value = work(name)
    except ToolkitError as error:
        return HostResult(name, error=error)
    return HostResult(name, value, code=grade(value))
