"""What programs on hosts say: one JSON object a line on standard output, and a beat while they work."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

BEAT = 5.0  # seconds; whoever listens takes a long silence for a lost host
_writing = threading.Lock()


def tell(value: dict[str, Any]) -> None:
    """Write one line, whole, whichever thread tells it; end the process when nobody listens any more."""
    try:
        with _writing:
            sys.stdout.write(json.dumps(value) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


def beat() -> None:
    """Tell for ever that this process is alive, whatever else it does; for a daemon thread."""
    while True:
        time.sleep(BEAT)
        tell({"beat": 1})
