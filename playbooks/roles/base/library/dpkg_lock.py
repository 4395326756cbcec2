"""Ansible module: waits for the lock of dpkg up to a limit, and names who holds it."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: dpkg_lock
short_description: Wait until no other program installs packages
description:
  - Waits for the locks that dpkg and apt take (C(F_SETLK), fcntl(2)), and fails with the name of the program
    that holds one. Takes none itself.
options:
  timeout:
    description: Seconds to wait.
    type: float
    default: 300
  paths:
    description: The lock files.
    type: list
    elements: path
    default: [/var/lib/dpkg/lock-frontend, /var/lib/dpkg/lock, /var/lib/apt/lists/lock]
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: It changes nothing.
"""

EXAMPLES = r"""
- name: Wait for other installations
  dpkg_lock:
    timeout: 60
"""

RETURN = r"""
waited:
  description: Seconds that it waited.
  returned: always
  type: float
"""

_POLL = 0.5
# struct flock on Linux: type, whence, start, length, pid (fcntl(2)).
_FLOCK = "hhqqi4x"


def holder(path: Path) -> int | None:
    """Process that holds a lock on the file; None where nobody does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else pid


def described(pid: int) -> str:
    """A process for people: its name and number, and since when it runs."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(Path(f"/proc/{pid}").stat().st_mtime))
    except OSError:
        return f"process {pid}"
    return f"{name} (pid {pid}, since {since})"


def main() -> None:
    """Run the module."""
    paths = ["/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock"]
    module = AnsibleModule(
        argument_spec={
            "timeout": {"type": "float", "default": 300},
            "paths": {"type": "list", "elements": "path", "default": paths},
        },
        supports_check_mode=True,
    )
    began = time.monotonic()
    while True:
        held = {path: pid for path in module.params["paths"] if (pid := holder(Path(path))) is not None}
        waited = round(time.monotonic() - began, 1)
        if not held:
            module.exit_json(changed=False, waited=waited)
        if waited >= module.params["timeout"]:
            path, pid = next(iter(held.items()))
            module.fail_json(
                msg=f"{path} is held by {described(pid)} after {waited:.0f} s; "
                "wait for it to end, or give it more time with ddtoolkit_dpkg_wait",
                waited=waited,
            )
        time.sleep(_POLL)


if __name__ == "__main__":
    main()
