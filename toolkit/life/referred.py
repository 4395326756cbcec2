"""What programs on this machine name, or run from, whichever release is current.

The host's own command and the unit that recovers at boot keep the code and the interpreter of the deploy that
wrote them; the timer of an experiment starts the return with those that it was begun with.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from toolkit.layout import TOOL, Layout
from toolkit.life import command
from toolkit.service import unit_files
from toolkit.service.systemd import RECOVER_UNIT


def referred(layout: Layout) -> set[Path]:
    """Copies of the toolkit and environments below a layout that are named or run from here."""
    folders = (os.fsencode(TOOL), os.fsencode(layout.environments))
    named = re.compile(b"(?:%s)/[A-Za-z0-9-]+" % b"|".join(map(re.escape, folders)))
    found = set()
    for file in _files():
        with contextlib.suppress(OSError):  # not there, another user's, or ended
            found |= set(named.findall(file.read_bytes()))
    return {Path(os.fsdecode(path)) for path in found}


def _files() -> Iterator[Path]:
    yield from (command.FOLDER / name for name in command.PROGRAMS)
    yield unit_files.path_of(RECOVER_UNIT)
    for process in Path("/proc").glob("[0-9]*"):
        yield from (process / "environ", process / "cmdline")
