"""Builds on all hosts before the first one is touched."""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError
from toolkit.fleet.deploy import Desired, build
from toolkit.fleet.results import HostResult

WANTED = Desired("llm", {"name": "llm"}, {}, {})


class Agents:
    """Builds on every host but `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.asked: list[str] = []

    def call(self, name: str, operation: str, args: dict[str, Any], tell: Any) -> dict[str, Any]:
        assert operation == "build"
        assert args["current"] == f"release of {name}"
        self.asked.append(name)
        if name == self.broken:
            raise ToolkitError(f"{name}: no disk")
        return {"built": {"on": name}}


def plan(host: str, *actions: str) -> HostResult:
    steps = [{"action": action, "reasons": []} for action in actions]
    return HostResult(host, {"plan": {"steps": steps, "empty": not steps}, "current": f"release of {host}"})


def test_hosts_that_get_a_release_are_built_and_no_others() -> None:
    agents = Agents()
    plans = [plan("a", "release", "restart"), plan("b"), plan("c", "start"), plan("d", "release")]
    found = build(WANTED, agents, plans, lambda *_: None, limit=4)  # type: ignore[arg-type]
    assert sorted(agents.asked) == ["a", "d"]
    assert [item.value.get("built") for item in found] == [{"on": "a"}, None, None, {"on": "d"}]
    assert [item.host for item in found] == ["a", "b", "c", "d"]


def test_a_failed_build_keeps_every_host_from_being_begun() -> None:
    lost = HostResult("c", error=ToolkitError("c: gone"))
    plans = [plan("a", "release"), plan("b", "release"), lost]
    found = build(WANTED, Agents("b"), plans, lambda *_: None, limit=4)  # type: ignore[arg-type]
    assert found[0].skipped == "not begun, since the build on b failed"
    assert str(found[1].error) == "b: no disk"
    assert found[2] is lost
