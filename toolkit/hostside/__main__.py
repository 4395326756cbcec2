"""`python -m toolkit.hostside`: serves one control machine over standard input and output, then ends.

When the connection breaks, the next beat fails and the agent ends; so it does when it has heard nothing for
long. A transaction goes on without it, and a removal is brought to its end first.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.hostside.operations import OPERATIONS, RESERVED, UNATTENDED
from toolkit.remote.protocol import BEAT, MAX_LINE, PATIENCE, error_to_json


class Line:
    """The way back: writes one object a line, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._lock = threading.Lock()

    def send(self, value: dict[str, Any]) -> None:
        """Write one object; when nobody listens any more, the agent ends unless it has to go on."""
        data = json.dumps(value, ensure_ascii=True).encode() + b"\n"
        try:
            with self._lock:
                while data:
                    data = data[self._file.write(data) :]
        except OSError:
            if not UNATTENDED.is_set():
                os._exit(1)


class Requests:
    """What the control machine sends; a thread reads it, so that its silence is noticed during work.

    Attributes:
        heard: when it sent something last, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, iter(self._lines.get, b""))

    def _read(self) -> None:
        for text in iter(lambda: sys.stdin.buffer.readline(MAX_LINE), b""):
            self.heard = time.monotonic()
            if not text.startswith(b'{"beat"'):
                self._lines.put(text)
        self._lines.put(b"")


def _beat(line: Line, requests: Requests, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT):
        silent = time.monotonic() - requests.heard
        if silent > PATIENCE and not UNATTENDED.is_set():
            os._exit(1)  # the locks are free with it
        count += 1
        line.send({"beat": count})


def _answer(request: dict[str, Any], line: Line) -> dict[str, Any]:
    operation = OPERATIONS.get(str(request.get("op")))
    if operation is None:
        return {"error": error_to_json(ToolkitError(f"unknown operation {request.get('op')!r}"))}
    try:
        return {"result": operation(dict(request.get("args") or {}), line.send)}
    except ToolkitError as error:
        return {"error": error_to_json(error)}
    except Exception as error:
        # A defect, not an expected failure: its place is for whoever mends it, its values are nobody's.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"internal error: {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
        return {"error": error_to_json(ToolkitError(said, hint="report it with the command and the version"))}
    finally:
        UNATTENDED.clear()


def main() -> None:
    """Serve until standard input ends."""
    # Nothing but the protocol may reach the channel, whatever a library prints.
    line = Line(os.dup(1))
    os.dup2(2, 1)
    ended = threading.Event()
    requests = Requests()
    threading.Thread(target=_beat, args=(line, requests, ended), daemon=True).start()
    with RESERVED:
        for request in requests:
            line.send(_answer(request, line))
    ended.set()


if __name__ == "__main__":
    main()
