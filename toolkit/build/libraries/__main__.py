"""`python -m toolkit.build.libraries ENGINE`: installs an engine's libraries on this host, or finds them.

One JSON object a line on standard output: `{"line": ...}` for progress, `{"beat": 1}` while there is none, at
last `{"changed": ..., "folder": ...}` or `{"error": ..., "hint": ...}` with status 1. Run as root under
systemd, a transient unit does the work: it goes on when the connection of whoever asked for it breaks, and
whoever asks next watches it too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from toolkit.build.libraries.install import ensure
from toolkit.build.libraries.place import install_in_unit, place_in
from toolkit.build.lock import lock_of
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.lines import tell
from toolkit.service.detached import may_detach


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="toolkit.build.libraries", allow_abbrev=False)
    parser.add_argument("engine")
    parser.add_argument("--root", type=Path, help="folder that everything lies below; default: the system's")
    parser.add_argument("--wheelhouse", type=Path, help="folder with wheels; default: pip's package index")
    parser.add_argument("--in-unit", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    layout = Layout(args.root)
    try:
        lock = lock_of(args.engine)
        place = place_in(layout, lock, args.wheelhouse)
        if args.in_unit or not may_detach():
            changed = ensure(lock, place, lambda text: tell({"line": text}))
        else:
            words = [args.engine]
            words += [] if args.root is None else ["--root", str(args.root)]
            words += [] if args.wheelhouse is None else ["--wheelhouse", str(args.wheelhouse)]
            return install_in_unit(lock, words, layout.state, tell)
    except ToolkitError as error:
        tell({"error": error.message, "hint": error.hint})
        return 1
    tell({"changed": changed, "folder": str(place.environments / lock.folder_name)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
