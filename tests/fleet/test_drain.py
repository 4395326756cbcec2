"""The load balancer's hooks around a change, as real programs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.fleet import drain
from toolkit.fleet.drain import Balancer
from toolkit.inventory.host import Host

DONE = {"outcome": {"exit_code": 0}}


def hook(log: Path, word: str, status: int = 0) -> tuple[str, ...]:
    code = f"open({str(log)!r}, 'a').write('{word} '); print('of {word}'); raise SystemExit({status})"
    return (sys.executable, "-c", code)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def ends(pid: int) -> bool:
    """Whether a process runs no more; one that was sent SIGKILL does for a moment (signal(7))."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # nobody has asked how it ended
            return True
        time.sleep(0.02)
    return False


def balancer() -> Balancer:
    return Balancer(lambda name, message: None)


def run(host: Host, log: Path, value: Any = DONE, *, serves: bool = True) -> Any:
    def change() -> Any:
        with log.open("a", encoding="utf-8") as file:
            file.write("change ")
        if isinstance(value, ToolkitError):
            raise value
        return value

    return balancer().drained(host, change, lambda: serves)


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


def test_what_a_terminal_would_obey_is_not_shown(log: Path) -> None:
    with pytest.raises(ToolkitError, match="status 3: \ufffd]0;x\ufffd \xe9\n\ufffdend;"):
        run(Host("h", drain=("sh", "-c", r"printf '\033]0;x\007 \303\251\n\000end'; exit 3")), log)


def test_a_hook_that_prints_without_end_fills_no_disk(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_LIMIT", 60.0)
    monkeypatch.setattr(drain, "_KEPT", 5000)
    prints = "import time\nfor i in range(10000): print('line', i, flush=True); time.sleep(0.0002)\n"
    sized = "import os\nwith open('size', 'w') as file: print(os.fstat(1).st_size, file=file)\n"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolkitError, match=r"(?s)status 3: .*line 9998\nline 9999;"):
        run(Host("h", drain=(sys.executable, "-c", f"{prints}{sized}raise SystemExit(3)")), log)
    assert int((tmp_path / "size").read_text()) < 50_000


@pytest.mark.parametrize("argument", ["a\0b", "\ud800"])
def test_an_argument_that_no_program_can_be_given_is_told(log: Path, argument: str) -> None:
    with pytest.raises(ToolkitError, match=r"h: ddtoolkit_drain: echo: .*; nothing was changed there"):
        run(Host("h", drain=("echo", argument)), log)


def test_a_hook_for_whose_words_there_is_no_place_is_told(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/absent")
    with pytest.raises(ToolkitError, match=r"h: ddtoolkit_undrain: true: .*; it serves, but stays drained"):
        run(Host("h", undrain=("true",)), log)


def test_a_host_that_cannot_be_put_back_serves_and_says_so(log: Path) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain", 1))
    with pytest.raises(ToolkitError, match="it serves, but stays drained"):
        run(host, log)


@pytest.mark.parametrize(("serves", "hooks"), [(True, "undrain "), (False, "")])
def test_a_start_puts_back_and_does_not_drain(log: Path, serves: bool, hooks: str) -> None:
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    assert balancer().undrained(host, lambda: DONE, lambda: serves) == DONE
    assert (log.read_text(encoding="utf-8") if log.exists() else "") == hooks


@pytest.mark.parametrize("serves", [False, True])
def test_a_drain_that_hangs_is_ended_with_all_that_it_began(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    monkeypatch.setattr(drain, "_LIMIT", 0.5)
    pids = tmp_path / "pids"
    hangs = ("sh", "-c", f"printf 'half-way'; sleep 60 & echo $! > {pids}; wait")
    begin = time.monotonic()
    with pytest.raises(ToolkitError) as caught:
        run(Host("h", drain=hangs, undrain=hook(log, "undrain")), log, serves=serves)
    assert time.monotonic() - begin < 10
    assert ends(int(pids.read_text()))
    after = "it was put back" if serves else "it may be drained, and stays so"
    said = "did not end within 0.5 s, and was killed: half-way; nothing was changed there; "
    assert caught.value.message == f"h: ddtoolkit_drain: sh: {said}{after}"
    assert (log.read_text(encoding="utf-8") if log.exists() else "") == ("undrain " if serves else "")


def test_what_a_hook_leaves_in_the_background_is_not_waited_for(log: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    leaves = ("sh", "-c", f"sleep 60 & echo $! > {pids}")
    begin = time.monotonic()
    try:
        assert run(Host("h", drain=leaves), log) == DONE
        assert time.monotonic() - begin < 10
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)


def test_who_is_drained_is_known(log: Path) -> None:
    """As an interrupt in the middle tells it."""
    known = balancer()
    host = Host("h", drain=hook(log, "drain"), undrain=hook(log, "undrain"))
    known.drained(host, lambda: log.write_text(f"{known.out} "), lambda: True)
    assert log.read_text(encoding="utf-8") == "{'h'} undrain "
    assert known.out == set()
    known.drained(host, lambda: None, lambda: False)
    assert known.out == {"h"}
