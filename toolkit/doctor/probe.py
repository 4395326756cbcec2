"""Sent as text into the unit's sandbox: tells what is seen from there, as one JSON object.

Its argument is a JSON object: `gpus` (whether to ask for them), `programs` (names to look for), `folders` (to
be written to) and `devices` (files to be opened).
"""

from __future__ import annotations

import getpass
import json
import os
import resource
import shutil
import subprocess
import sys
from typing import Any

_LIMIT = 15.0


def limit(which: int) -> int | None:
    """A soft limit; None is infinity."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def openable(path: str) -> str:
    """Why a device cannot be opened for reading and writing, "" where it can."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def writable(path: str) -> str:
    """Why a folder cannot be written to, "" where it can; `absent` where there is none."""
    if not os.path.isdir(path):  # noqa: PTH112  sent alone, it stays small
        return "absent"
    return "" if os.access(path, os.W_OK | os.X_OK) else "not writable"


def gpus() -> dict[str, Any]:
    """What `nvidia-smi -L` says inside."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607  that of the unit's PATH is meant
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"status": None, "out": "", "err": str(error)}
    return {"status": done.returncode, "out": done.stdout, "err": done.stderr}


def main() -> None:
    """Look and tell."""
    wanted = json.loads(sys.argv[1])
    seen = {
        "user": getpass.getuser(),
        "path": os.environ.get("PATH", ""),
        "memlock": limit(resource.RLIMIT_MEMLOCK),
        "nofile": limit(resource.RLIMIT_NOFILE),
        "programs": {name: shutil.which(name) for name in wanted["programs"]},
        "devices": {path: openable(path) for path in wanted["devices"]},
        "folders": {path: writable(path) for path in wanted["folders"]},
        "gpus": gpus() if wanted["gpus"] else None,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
