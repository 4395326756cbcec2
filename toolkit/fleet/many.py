"""Work on many hosts: at the same time, or in turn with a stop at the first failure."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
    return _spread(names, lambda name: _attempt(name, work, grade), limit)


def in_turn(names: Sequence[str], work: Work, *, batch: int, grade: Grade = _good) -> list[HostResult]:
    """Run `work` on `batch` hosts at a time; after a failure nothing new is begun.

    Returns:
        A result for each name, in the order of `names`.
    """
    failed: list[str] = []

    def one(name: str) -> HostResult:
        if failed:
            return HostResult(name, skipped=f"not begun, since {failed[0]} failed")
        result = _attempt(name, work, grade)
        if not result.ok:
            failed.append(name)
        return result

    return _spread(names, one, batch)


def _spread(names: Sequence[str], one: Callable[[str], HostResult], limit: int) -> list[HostResult]:
    """Call `one` with each name from at most `limit` threads, which never outlive an interrupted command."""
    todo, done = deque(names), queue.SimpleQueue[HostResult | BaseException]()

    def run() -> None:
        while True:
            try:
                name = todo.popleft()
            except IndexError:
                return
            try:
                done.put(one(name))
            except BaseException as error:  # raised where the results are waited for
                done.put(error)

    for _ in range(min(max(limit, 1), len(names))):
        threading.Thread(target=run, daemon=True).start()
    found: dict[str, HostResult] = {}
    while len(found) < len(names):
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        found[result.host] = result
    return [found[name] for name in names]


def _attempt(name: str, work: Work, grade: Grade) -> HostResult:
    try:
        value = work(name)
    except ToolkitError as error:
        return HostResult(name, error=error)
    return HostResult(name, value, code=grade(value))
