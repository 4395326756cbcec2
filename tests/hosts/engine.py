"""Lets a host run this process's own interpreter with its libraries, at the same paths and read-only.

The checkout is not among them, so an editable installation of the toolkit is not importable in the host: a
test pushes the toolkit as a deploy would.
"""

import stat
import sys
import sysconfig
from pathlib import Path


def binds() -> list[str]:
    """Paths that the interpreter and its environment consist of."""
    if sys.base_prefix == "/usr":
        # Only this interpreter's part of a Debian: the host's own /usr stays.
        base = [str(Path(sys.executable).resolve()), sysconfig.get_path("stdlib")]
    else:
        base = [sys.base_prefix]
    return [*base, sys.prefix] if sys.prefix != sys.base_prefix else base


def prepare(files: Path) -> None:
    """Open the way to what lies in root's home folder for every user of the host."""
    if any(Path(path).is_relative_to("/root") for path in binds()):
        home = files / "root"
        home.mkdir()
        home.chmod(stat.S_IRWXU | stat.S_IXGRP | stat.S_IXOTH)
