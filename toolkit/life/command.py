"""The host's own `ddtoolkit`: two small programs below /opt/ddtoolkit/bin, and a link to one on the PATH."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files import replace_file

FOLDER = Path("/opt/ddtoolkit/bin")
LINK = Path("/usr/local/bin/ddtoolkit")
PROGRAMS = {
    "ddtoolkit": "from toolkit.cli.main import main; main()",
    "ddtoolkit-agent": "from toolkit.hostside.__main__ import main; main()",
}
_MODE = 0o755


def install(tool: Path, python: Path) -> None:
    """Write the programs, so that they run this copy of the toolkit under this interpreter.

    A file of someone else at the place of the link is left alone.

    Args:
        tool: folder that holds the package `toolkit`.
        python: interpreter that has what it needs.

    Raises:
        ToolkitError: they cannot be written.
    """
    try:
        FOLDER.mkdir(mode=_MODE, parents=True, exist_ok=True)
        for name, code in PROGRAMS.items():
            text = _program(tool, python, code).encode()
            path = FOLDER / name
            if not (path.is_file() and path.read_bytes() == text):
                replace_file(path, text, mode=_MODE)
        if not os.path.lexists(LINK):
            LINK.symlink_to(FOLDER / LINK.name)
    except OSError as error:
        raise ToolkitError(f"{error.filename or FOLDER}: {error.strerror}") from None


def remove() -> None:
    """Remove the programs, and the link where it is ours."""
    if LINK.is_symlink() and LINK.readlink() == FOLDER / LINK.name:
        LINK.unlink()
    for name in PROGRAMS:
        (FOLDER / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        FOLDER.rmdir()


def _program(tool: Path, python: Path, code: str) -> str:
    path, program, text = (shlex.quote(str(item)) for item in (tool, python, code))
    run = f'PYTHONPATH={path} exec {program} -P -c {text} "$@"'
    return f"#!/bin/sh\n# Written by ddtoolkit at each deploy.\n{run}\n"
