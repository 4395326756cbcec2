"""What commands print: progress, prompts and errors on standard error, the answer on standard output.

The answer is what a reading command was asked for, or with `--json` the data alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import typer

from toolkit.errors import ConfigError, ToolkitError
from toolkit.visible import escaped, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from toolkit.profile.loading import ResolvedProfile


def console(*, stderr: bool = True) -> Console:
    """A console on standard error or output; plain text when that is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Off a terminal nothing limits the width, and a wrapped id cannot be copied.
    width = None if stream.isatty() or "COLUMNS" in os.environ else 200
    # What is printed came from a profile, a host or a command line: `[x]` and `:x:` in it are text.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def say(message: str = "") -> None:
    """Print a line for humans."""
    typer.echo(visible(message), err=True)


def answer(what: str | Table) -> None:
    """Print a line or a table that was asked for."""
    if isinstance(what, str):
        typer.echo(visible(what))
    else:
        console(stderr=False).print(what)


_emitted: list[bool] = []  # whether the one JSON document of this command is out


def emit(value: Any) -> None:
    """Print `value` as JSON for programs, the only document of a command."""
    _emitted.append(True)
    text = escaped(json.dumps(value, indent=2, ensure_ascii=False))
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # by the locale, or a name that is no UTF-8 and came as surrogates
        text = json.dumps(value, indent=2)
    typer.echo(text)


def emit_line(value: Any) -> None:
    """Print `value` as one line of JSON for programs that read as it comes."""
    typer.echo(json.dumps(value))


def table(*columns: str, whole: Collection[str] = ()) -> Table:
    """An empty table with the house style; columns in `whole` are never wrapped."""
    from rich import box
    from rich.table import Table

    class Shown(Table):
        def add_row(self, *cells: RenderableType | None, **others: Any) -> None:
            super().add_row(*(visible(cell) if isinstance(cell, str) else cell for cell in cells), **others)

    made = Shown(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in whole)
    return made


def show_error(error: ToolkitError, *, as_json: bool) -> None:
    """Print an error and its next step; as JSON too where JSON was asked for."""
    for line in error.message.splitlines():
        say(f"error: {line}")
    if error.hint:
        say(f"  next: {error.hint}")
    if as_json and not _emitted:
        from toolkit.errors import ConfigError

        problems = [str(problem) for problem in error.problems] if isinstance(error, ConfigError) else []
        emit({"ok": False, "error": error.message, "hint": error.hint, "problems": problems})


def show_end(stop: SystemExit) -> None:
    """Print as JSON what ended a command that asked for JSON and has printed none, such as a wrong option."""
    if stop.code in (None, 0) or _emitted:
        return
    words = getattr(stop.__context__, "format_message", None)
    said = words() if words is not None else f"it ended with exit code {stop.code}"
    hint = "standard error has more; --help lists the options"
    emit({"ok": False, "error": said, "hint": hint, "problems": []})


def tell_doubts(resolved: ResolvedProfile) -> None:
    """Say what is allowed in a profile and may not be meant: its warnings, and overlays at odds."""
    for warning in resolved.warnings:
        say(f"warning: {warning}")
    for override in resolved.overrides:
        say(f"notice: {override}")


def confirm(question: str) -> None:
    """Ask a person whether to go on.

    Raises:
        Exit: the answer is no, which is said to have changed nothing.
    """
    if not typer.confirm(visible(question), err=True):
        say("nothing was changed")
        raise typer.Exit(1)


def require_yes(*, yes: bool, as_json: bool) -> None:
    """Make sure that a command which prints JSON may change something.

    Raises:
        ConfigError: it was not told to.
    """
    if as_json and not yes:
        raise ConfigError("--json changes nothing without --yes", hint="add --yes")
