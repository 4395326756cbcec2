"""Which processes the GPU driver still knows, by nvidia-smi."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection

from toolkit.errors import ToolkitError
from toolkit.service.systemctl import command

_QUERY = ("--query-compute-apps=pid", "--format=csv,noheader,nounits")
_LIMIT = 20.0
_POLL = 0.2


def wait_released(pids: Collection[int], limit: float) -> str:
    """Wait until none of these processes holds a GPU; why they still do after `limit` seconds, else "".

    The driver frees a killed process's memory only after a while. Without nvidia-smi there is nothing to ask.
    """
    if not pids or shutil.which("nvidia-smi") is None:
        return ""
    end = time.monotonic() + limit
    while True:
        try:
            done = command("nvidia-smi", *_QUERY, limit=_LIMIT)
        except ToolkitError as error:
            return f"whether the GPUs are free is not known: {error.message}"
        held = sorted(pid for pid in _numbers(done.stdout) if pid in pids)
        if not held:
            return ""
        if time.monotonic() > end:
            return f"the GPU driver still holds memory of process {', '.join(map(str, held))}"
        time.sleep(_POLL)


def _numbers(text: str) -> list[int]:
    return [int(line) for line in map(str.strip, text.splitlines()) if line.isdecimal()]
