"""A change that is watched through connections that break."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from toolkit.errors import UnreachableError
from toolkit.fleet.connections import Connections
from toolkit.inventory.host import Host
from toolkit.remote import absence

EVENT = {"event": {"step": "ready"}}
Answer = Callable[[Callable[[dict[str, Any]], None]], Any]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A change during which the host answers so, one after the other, and then never again."""
    monkeypatch.setattr(absence, "PATIENCE", 0.3)
    monkeypatch.setattr(absence, "RETRY", 0.02)

    def run(*answers: Answer) -> Any:
        left = list(answers)

        def call(self: Connections, name: str, operation: str, args: Any, tell: Any = None) -> Any:
            assert operation == ("change" if len(left) == len(answers) else "follow")
            answer = left.pop(0) if left else lost
            return answer(tell)

        monkeypatch.setattr(Connections, "call", call)
        with Connections([Host("ct200")]) as connections:
            connections._before["ct200"] = None
            return connections.change("ct200", "change", {"service": "x"}, lambda _: None)

    return run


def lost(_: Any) -> Any:
    raise UnreachableError("ct200: the SSH connection was lost")


def at_work(tell: Callable[[dict[str, Any]], None]) -> Any:
    tell(EVENT)
    time.sleep(0.4)
    return lost(tell)


def test_a_host_that_was_heard_meanwhile_may_be_lost_again(watched: Callable[..., Any]) -> None:
    assert watched(at_work, at_work, lost, lambda _: "done") == "done"


@pytest.mark.parametrize(
    ("first", "words"), [(at_work, "the change goes on on"), (lost, "may have been begun, and goes on then,")]
)
def test_one_that_stays_away_is_given_up(watched: Callable[..., Any], first: Answer, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match=rf"was lost; .*{words}") as caught:
        watched(first)
    assert 0.3 < time.monotonic() - begin < 5
    assert caught.value.hint == "ddtoolkit status x"
