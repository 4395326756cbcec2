"""What a terminal would obey is shown instead."""

import json

import pytest
import typer

from toolkit.cli.output import answer, confirm, emit, say, table
from toolkit.visible import visible

HOSTILE = "a\x1b[2Jb\x07\x9b31m\r\n\tc\rd\u202ee"
SHOWN = "a\ufffd[2Jb\ufffd\ufffd31m\n\tc\ufffdd\ufffde"


def test_all_that_is_obeyed_is_replaced_and_the_rest_stays() -> None:
    assert visible(HOSTILE) == SHOWN
    plain = "Grüße, 東京 \N{NO-BREAK SPACE}\N{SNOWMAN}\n\tnext"
    assert visible(plain) == plain


def test_whatever_commands_print_passes_through_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(typer, "confirm", lambda question, err: asked.append(question) or err)
    say(HOSTILE)
    answer(HOSTILE)
    confirm(HOSTILE)
    rows = table("host")
    rows.add_row("x\x1by")
    answer(rows)
    shown = capsys.readouterr()
    assert shown.err == f"{SHOWN}\n"
    assert shown.out.startswith(f"{SHOWN}\n")
    assert "x\ufffdy" in shown.out
    assert "\x1b" not in shown.out
    assert asked == [SHOWN]


def test_json_has_the_same_values_and_nothing_that_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"shown": HOSTILE, "plain": "Grüße"})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"shown": HOSTILE, "plain": "Grüße"}
    assert visible(shown) == shown
    assert "Grüße" in shown
