"""wheelhouse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import Json
from toolkit.cli.output import answer, emit, say
from toolkit.errors import ToolkitError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("wheelhouse")(wheelhouse)


def wheelhouse(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder; made when missing.")],
    engine: Annotated[str, typer.Option("--engine", help="Whose libraries.")] = "embedded",
    python: Annotated[
        str | None, typer.Option("--python", metavar="VERSION", help="The hosts' Python; unset: this one's.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="NAME", help="As `uname -m` says; unset: as here.")
    ] = None,
    given: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="WHEEL", help="Take this file for its library; may be repeated."),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control/--no-control", help="Also this tool with all it needs, for a machine that deploys."
        ),
    ] = True,
    control_python: Annotated[
        str | None,
        typer.Option("--control-python", metavar="VERSION", help="That machine's Python; unset: this one's."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare it with its checksums.")] = False,
    as_json: Json = False,
) -> None:
    """Fill a folder with all that machines without a package index install; hashes are checked."""
    from toolkit.build import wheelhouse as house
    from toolkit.build.lock import lock_of

    if check:
        faults = house.verify(out)
        if as_json:
            emit({"ok": not faults, "faults": faults})
        if faults:
            raise ToolkitError(
                f"{out}: {'; '.join(faults)}", hint="ddtoolkit wheelhouse with the same --out mends it"
            )
        say(f"{out}: as its checksums say")
        return
    like = house.here()
    target = house.Target(python or like.python, machine or like.machine)
    deploying = house.Target(control_python or like.python, like.machine) if control else None
    wheels = house.make(lock_of(engine), out, target, given or (), say, control=deploying)
    size = sum(wheel.stat().st_size for wheel in wheels)
    if as_json:
        emit({"ok": True, "folder": str(out), "wheels": [wheel.name for wheel in wheels], "bytes": size})
        return
    answer(f"{out}: {len(wheels)} wheels for Python {target.python} on {target.machine}, {size >> 20} MiB")
    if control:
        words = f"pip install --no-index --find-links {out} --require-hashes -r {out}/control.txt"
        say(f"this tool there: {words}")
    say(f"the hosts: ddtoolkit deploy profile NAME -i INVENTORY --wheelhouse {out}")
