"""`python -m toolkit.weights`: reads one request, a JSON line, and answers it; runs on hosts.

One JSON object a line on standard output: `{"line": ...}` for progress, at last an object with `changed`, or
`{"error": ..., "hint": ..., "kind": ...}` with status 1. While it works `{"beat": ...}` tells
that it is alive.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.lines import beat, tell
from toolkit.weights import seeding, work


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="toolkit.weights", allow_abbrev=False)
    parser.add_argument("--in-unit", type=Path, metavar="REQUEST", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, nargs=2, metavar=("REQUEST", "READY"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    os.umask(0o022)
    try:
        if args.serve is not None:
            seeding.serve(*args.serve)
            return 0
        if args.in_unit is not None:
            answer = work.add_in_unit(args.in_unit, tell)
        else:
            threading.Thread(target=beat, daemon=True).start()
            answer = _answer()
    except ToolkitError as error:
        tell({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
        return 1
    except OSError as error:
        tell({"error": f"{error.filename or 'weights'}: {error.strerror or error}", "hint": None})
        return 1
    tell(answer)
    return 0


def _answer() -> dict[str, Any]:
    try:
        request = json.loads(sys.stdin.readline())
        verb = work.VERBS[request["verb"]]
    except (ValueError, KeyError, TypeError):
        raise ToolkitError("the request is no JSON object with a known `verb`") from None
    return verb(request, tell)


if __name__ == "__main__":
    sys.exit(main())
