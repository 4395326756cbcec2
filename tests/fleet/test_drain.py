"""The load balancer's hooks around a change, as real programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.fleet.drain import drained, undrained
from toolkit.inventory.host import Host

DONE = {"outcome": {"exit_code": 0}}


def hook(log: Path, word: str, status: int = 0) -> tuple[str, ...]:
    code = f"open({str(log)!r}, 'a').write('{word} '); print('of {word}'); raise SystemExit({status})"
    return (sys.executable, "-c", code)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def run(host: Host, log: Path, value: Any = DONE, *, serves: bool = True) -> Any:
    def change() -> Any:
        with log.open("a", encoding="utf-8") as file:
            file.write("change ")
        if isinstance(value, ToolkitError):
            raise value
        return value

    return drained(host, change, lambda: serves, lambda name, message: None)


def test_it_is_drained_before_and_put_back_after(log: Path) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    assert run(host, log) == DONE
    assert log.read_text(encoding="utf-8") == "drain change undrain "


def test_without_hooks_only_the_change_is_made(log: Path) -> None:
    assert run(Host("h"), log) == DONE
    assert log.read_text(encoding="utf-8") == "change "


@pytest.mark.parametrize("code", [0, 1, 5, 6])
@pytest.mark.parametrize(("serves", "after"), [(True, "undrain "), (False, "")])
def test_it_is_put_back_only_where_it_serves(log: Path, code: int, serves: bool, after: str) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    run(host, log, {"outcome": {"exit_code": code}}, serves=serves)
    assert log.read_text(encoding="utf-8") == f"drain change {after}"


def test_a_host_that_cannot_be_drained_is_left_alone(log: Path) -> None:
    host = Host("h", drain=hook(log, "drain", 3), undrain=hook(log, "undrain"))
    with pytest.raises(ToolkitError, match=r"h: ddtoolkit_drain: .* status 3: of drain; nothing was changed"):
        run(host, log)
    assert log.read_text(encoding="utf-8") == "drain "


def test_a_hook_that_is_no_program_is_named(log: Path) -> None:
    with pytest.raises(ToolkitError, match="h: ddtoolkit_drain: /absent/balancer: "):
        run(Host("h", drain=("/absent/balancer", "x")), log)
    assert not log.exists()


def test_a_change_that_fails_says_that_the_host_stays_drained(log: Path) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    with pytest.raises(ToolkitError, match=r"it broke \(h stays drained\)"):
        run(host, log, ToolkitError("it broke"), serves=False)
    assert log.read_text(encoding="utf-8") == "drain change "


def test_a_change_that_was_refused_leaves_the_host_as_it_was(log: Path) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    with pytest.raises(ToolkitError, match=r"^it was refused$"):
        run(host, log, ToolkitError("it was refused"))
    assert log.read_text(encoding="utf-8") == "drain change undrain "


def test_what_a_hook_prints_does_not_matter(log: Path) -> None:
    noisy = (sys.executable, "-c", "import sys; sys.stdout.buffer.write(b'\\xff\\xfe'); sys.exit(3)")
    with pytest.raises(ToolkitError, match="status 3"):
        run(Host("h", drain=noisy), log)


def test_a_host_that_cannot_be_put_back_serves_and_says_so(log: Path) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain", 1))
    with pytest.raises(ToolkitError, match="it serves, but stays drained"):
        run(host, log)


@pytest.mark.parametrize(("serves", "hooks"), [(True, "undrain "), (False, "")])
def test_a_start_puts_back_and_does_not_drain(log: Path, serves: bool, hooks: str) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    assert undrained(host, lambda: DONE, lambda: serves, lambda name, message: None) == DONE
    assert (log.read_text(encoding="utf-8") if log.exists() else "") == hooks
