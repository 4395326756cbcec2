"""A deploy stops everywhere where a host fails before the first restart."""

from __future__ import annotations

import pytest

from toolkit.errors import ToolkitError, UnreachableError
from toolkit.fleet.halt import halted, leaving_out
from toolkit.fleet.results import HostResult


def plan(host: str, *, empty: bool = False) -> HostResult:
    return HostResult(host, {"plan": {"steps": [], "empty": empty}, "current": None})


def test_a_host_that_failed_keeps_the_others_from_being_begun() -> None:
    failed, skipped = (
        HostResult("b", error=ToolkitError("b: no disk")),
        HostResult("d", skipped="of before"),
    )
    plans = [plan("a"), failed, plan("c", empty=True), skipped]
    found = halted(plans, "not restarted, since provisioning {} failed")
    assert found[0] == HostResult("a", skipped="not restarted, since provisioning b failed")
    assert found[1:] == plans[1:]
    assert halted([plan("a"), skipped], "not restarted, since provisioning {} failed") == [plan("a"), skipped]


@pytest.mark.parametrize(
    ("limit", "pattern"),
    [
        (None, "!b,!d"),
        ("gpus", "gpus,!b,!d"),
        ("gpus,ct200", "gpus,ct200,!b,!d"),
        ("gpus:ct200", "gpus:ct200:!b:!d"),
    ],
)
def test_an_unreachable_host_can_be_left_out(limit: str | None, pattern: str) -> None:
    gone = UnreachableError("b: no SSH", hint="check the address")
    plans = [
        plan("a"),
        HostResult("b", error=gone),
        HostResult("c", error=ToolkitError("c: no")),
        HostResult("d", error=UnreachableError("d: gone")),
    ]
    found = leaving_out(plans, limit)
    leave = f"deploy the others without it: --limit '{pattern}'"
    assert found[1].error is not None
    assert found[1].error.hint == f"check the address; or {leave}"
    assert found[1].exit_code == UnreachableError.exit_code
    assert found[3].error is not None
    assert found[3].error.hint == leave
    assert [found[0], found[2]] == [plans[0], plans[2]]
    assert leaving_out([plans[1], plans[3]], limit) == [plans[1], plans[3]]
