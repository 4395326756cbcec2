"""docs/walk.md: what it tells people to type is what the commands take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from scripts.walk import BLOCK, PROMPT, TEMPLATE
from toolkit.cli.main import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "walk.md"
COMMAND = typer.main.get_command(app)


def typed(text: str) -> list[str]:
    """Every command line in the page's consoles."""
    blocks = [block[3] for block in BLOCK.finditer(text) if block[1] == "console"]
    lines = [
        line.removeprefix(PROMPT)
        for block in blocks
        for line in block.splitlines()
        if line.startswith(PROMPT)
    ]
    return [line for line in lines if line != "echo $?"]


def parse(line: str) -> str:
    """Parse a command line as the program would, without running it; the command's full name.

    Raises:
        ClickException: there is no such command, option or argument.
    """
    words = shlex.split(line)[1:]
    command, names = COMMAND, ["ddtoolkit"]
    while hasattr(command, "resolve_command"):
        context = command.make_context(names[-1], list(words))
        name, command, words = command.resolve_command(context, words)
        names.append(str(name))
    command.make_context(names[-1], list(words))
    return " ".join(names)


def ours(text: str) -> list[str]:
    return [line for line in typed(text) if line.startswith("ddtoolkit ")]


@pytest.mark.parametrize("line", ours(PAGE.read_text(encoding="utf-8")))
def test_a_command_of_the_walk_exists_with_its_options(line: str) -> None:
    assert parse(line).startswith("ddtoolkit ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ddtoolkit swop systemd-cpu", "swop"),
        ("ddtoolkit hosts distrust inference-1", "distrust"),
        ("ddtoolkit plan systemd-cpu --explain", "--explain"),
        ("ddtoolkit rollback systemd-cpu --until r1", "--until"),
        ("ddtoolkit hosts trust inference-1", "--fingerprint"),
        ("ddtoolkit logs systemd-cpu -n few", "--lines"),
    ],
)
def test_what_does_not_exist_is_noticed(line: str, said: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  the parser's own, whatever parser typer brings
        parse(line)
    assert said in caught.value.format_message()


def test_the_page_was_made_from_the_template() -> None:
    """What is between the outputs, and every command, is the template's; the outputs are another run's."""
    page = PAGE.read_text(encoding="utf-8")
    address = re.search(r"ansible_host: (\S+)", page)
    fingerprint = re.search(r"SHA256:\S+", page)
    assert address is not None
    assert fingerprint is not None
    made = TEMPLATE.read_text(encoding="utf-8").format(address=address[1], fingerprint=fingerprint[0])
    assert typed(made) == typed(page)
    consoles = re.compile(r"^```console.*?^```$", re.MULTILINE | re.DOTALL)
    assert consoles.sub("", made) == consoles.sub("", page)


def test_the_walk_shows_each_of_its_ends() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for said in (
        "deploy: committed", "nothing to do", "swap: rolled back", "swap: committed", "rollback: committed",
        "2 drifts", "repair ", "as it was deployed",
    ):  # fmt: skip
        assert said in page, said
    assert "/work" not in page
