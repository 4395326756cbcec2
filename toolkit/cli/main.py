"""The command `ddtoolkit`."""

from __future__ import annotations

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
