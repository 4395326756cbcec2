"""Work on many hosts: side by side, in turn, and what it amounts to."""

from __future__ import annotations

import threading
import time

import pytest

from toolkit.errors import LockedError, ToolkitError, UnreachableError
from toolkit.fleet.many import at_once, in_turn
from toolkit.fleet.results import HostResult, to_json, worst

NAMES = ["a", "b", "c", "d"]


def failing_on(*bad: str):
    def work(name: str) -> str:
        if name in bad:
            raise UnreachableError(f"{name}: gone")
        return name.upper()

    return work


def test_one_hosts_failure_is_no_others() -> None:
    results = at_once(NAMES, failing_on("b"), limit=2)
    assert [item.host for item in results] == NAMES
    assert [item.value for item in results] == ["A", None, "C", "D"]
    assert results[1].exit_code == 4


def test_no_more_hosts_than_the_limit_work_at_the_same_time() -> None:
    running, most, changed = 0, 0, threading.Condition()

    def work(_: str) -> None:
        nonlocal running, most
        with changed:
            running += 1
            most = max(most, running)
            changed.notify_all()
            changed.wait_for(lambda: most >= 3, 10)
        time.sleep(0.05)  # in which a fourth would come
        with changed:
            running -= 1

    at_once([str(number) for number in range(8)], work, limit=3)
    assert most == 3


def test_after_a_failure_no_further_host_is_begun() -> None:
    begun: list[str] = []

    def work(name: str) -> str:
        begun.append(name)
        return failing_on("b")(name)

    results = in_turn(NAMES, work, batch=1)
    assert begun == ["a", "b"]
    assert [item.skipped for item in results] == ["", "", *["not begun, since b failed"] * 2]


def test_a_change_that_was_undone_stops_the_others_too() -> None:
    results = in_turn(NAMES, str.upper, batch=1, grade=lambda value: 5 if value == "A" else 0)
    assert [item.exit_code for item in results] == [5, 0, 0, 0]
    assert [bool(item.skipped) for item in results] == [False, True, True, True]


def test_hosts_of_one_batch_work_side_by_side() -> None:
    together = threading.Barrier(2, timeout=10)
    results = in_turn(NAMES, lambda name: together.wait() >= 0 and name, batch=2)
    assert all(item.ok for item in results)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((4, 0), 4), ((4, 3), 3), ((3, 1), 1), ((1, 5), 5), ((5, 6), 6), ((4, 2), 2)],
)
def test_the_worst_is_what_is_told(codes: tuple[int, ...], expected: int) -> None:
    assert worst([HostResult(str(index), code=code) for index, code in enumerate(codes)]) == expected


def test_json_has_each_host() -> None:
    shown = to_json(
        [
            HostResult("a", {"x": 1}),
            HostResult("b", error=LockedError("held", hint="wait")),
            HostResult("c", skipped="not begun, since b failed"),
            HostResult("d", error=ToolkitError("broken")),
        ]
    )
    assert (shown["ok"], shown["exit_code"]) == (False, 1)
    assert shown["hosts"]["a"] == {"ok": True, "exit_code": 0, "result": {"x": 1}}
    assert shown["hosts"]["b"]["hint"] == "wait"
    assert shown["hosts"]["c"] == {"ok": False, "exit_code": 0, "skipped": "not begun, since b failed"}


def test_an_interrupt_is_raised_while_hosts_still_work() -> None:
    free = threading.Event()

    def work(name: str) -> str:
        if name == "a":
            raise KeyboardInterrupt
        free.wait(20)
        return name

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        at_once(NAMES, work, limit=4)
    assert time.monotonic() - begin < 5
    free.set()
