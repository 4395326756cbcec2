"""The command `ddtoolkit`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from toolkit import __version__
from toolkit.cli import change, checks, deploy, profiles, service
from toolkit.cli.output import say, show_error
from toolkit.errors import EXIT_INTERRUPTED, ToolkitError

app = typer.Typer(
    name="ddtoolkit",
    help="Deploy, watch and change inference servers that decode with DDTree.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for module in (deploy, service, change, checks, profiles):
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


def main() -> None:
    """Run the command line; every expected error ends with its message, its next step and its exit code."""
    try:
        app()
    except ToolkitError as error:
        show_error(error, as_json="--json" in sys.argv)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe went away; Python would complain again while closing standard output.
        sys.stderr.close()
        sys.exit(EXIT_INTERRUPTED)
