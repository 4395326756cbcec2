"""The command `ddtoolkit`."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from toolkit import __version__
from toolkit.cli import (
    change,
    checks,
    deploy,
    doctor,
    drift,
    history,
    hosts,
    life,
    models,
    profiles,
    service,
    wheels,
)
from toolkit.cli.output import show_end, show_error
from toolkit.errors import EXIT_INTERRUPTED, StoppedWatchingError, ToolkitError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = typer.Typer(
    name="ddtoolkit",
    help="Deploy, watch and change inference servers that decode with DDTree.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for module in (
    deploy,
    service,
    change,
    history,
    checks,
    drift,
    doctor,
    hosts,
    models,
    profiles,
    wheels,
    life,
):
    module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _interrupted(*_: object) -> NoReturn:
    raise StoppedWatchingError("interrupted; what serves was not touched")


def main() -> None:
    """Run the command line; every expected error ends with its message, its next step and its exit code."""
    signal.signal(signal.SIGINT, _interrupted)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is from the start
    try:
        app()
    except ToolkitError as error:
        show_error(error, as_json="--json" in sys.argv)
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if "--json" in sys.argv:
            show_end(stop)
        raise
    except BrokenPipeError:
        # The reader of a pipe went away; Python would complain again while closing standard output.
        sys.stderr.close()
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = error.filename or "standard output"
        show_error(
            ToolkitError(f"{where}: cannot be written: {error.strerror}", hint="free some space there"),
            as_json=False,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to be written would fail once more
        sys.exit(ToolkitError.exit_code)
