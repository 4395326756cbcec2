"""`python -m toolkit.build.wheels`: answers requests about this host's store of wheels to its input's end.

While it works `{"beat": ...}` tells that it is alive; a sender that falls silent is given up, so that the
store is free for the next one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from toolkit.build.wheels.arrive import Session
from toolkit.errors import ToolkitError
from toolkit.lines import BEAT, tell

_SILENCE = 30.0


class _Input:
    """Standard input, and since when it is waited for."""

    def __init__(self) -> None:
        self.waiting_since: float | None = None
        self._stream = os.fdopen(0, "rb", closefd=False)

    def line(self) -> bytes:
        """The next line; b"" at the end."""
        self.waiting_since = time.monotonic()
        try:
            return self._stream.readline()
        finally:
            self.waiting_since = None

    def read(self, count: int) -> bytes:
        """At most `count` bytes, at least one; b"" at the end."""
        self.waiting_since = time.monotonic()
        try:
            return self._stream.read1(count)
        finally:
            self.waiting_since = None


def main() -> int:
    """Run it; the exit status."""
    os.umask(0o022)
    source = _Input()
    threading.Thread(target=_watch, args=(source,), daemon=True).start()
    session = Session(source.read, tell)
    try:
        while line := source.line():
            session.answer(json.loads(line))
    except ToolkitError as error:
        tell({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
        return 1
    except (KeyError, TypeError, ValueError) as error:
        tell({"error": f"no request about wheels: {error}", "hint": None})
        return 1
    finally:
        session.close()
    return 0


def _watch(source: _Input) -> None:
    while True:
        time.sleep(BEAT)
        since = source.waiting_since
        if since is not None and time.monotonic() - since > _SILENCE:
            os._exit(1)
        tell({"beat": 1})


if __name__ == "__main__":
    sys.exit(main())
