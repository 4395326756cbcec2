"""`python -m toolkit.doctor`: reads a request, a JSON line, and answers with the facts; runs on hosts.

It runs under the host's own Python with nothing installed. While it works, `{"beat": ...}` tells that it is
alive; the last line is an object with `changed` (always false) and `facts`.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from toolkit.doctor.collect import collect

_BEAT = 5.0
_writing = threading.Lock()


def main() -> None:
    """Answer one request; what a program left behind that cannot be killed keeps nobody waiting."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_beat, daemon=True).start()
    _tell({"changed": False, "facts": collect(request)})
    os._exit(0)


def _beat() -> None:
    while not threading.Event().wait(_BEAT):
        _tell({"beat": 1})


def _tell(value: object) -> None:
    with _writing:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
