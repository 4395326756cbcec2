"""Ansible module: what a host has of what provisioning looks at, in one call."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: base_host
short_description: Read a host's user, free space, packages and NTP clients
description:
  - Changes nothing. Each call of a module costs a quarter of a second, and gathering facts twice that.
options:
  folder:
    description: Where the free space is read; of one that is not there yet, its nearest parent's.
    type: path
    required: true
  packages:
    description: Names of packages to look for.
    type: list
    elements: str
    default: []
  ntp_clients:
    description: Units of NTP clients.
    type: list
    elements: str
    default: []
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: It changes nothing.
"""

EXAMPLES = r"""
- name: Look at the host
  base_host:
    folder: /opt/ddtoolkit
    packages: [python3-venv]
"""

RETURN = r"""
uid:
  description: Number of the user as whom modules run.
  returned: always
  type: int
free:
  description: Bytes that are free for that user.
  returned: always
  type: int
installed:
  description: Installed packages of those asked for, each once as name and once as name=version.
  returned: always
  type: list
  elements: str
held:
  description: Names of those that are held.
  returned: always
  type: list
  elements: str
ntp_due:
  description: Whether an NTP client has to be started. A container has its host's time.
  returned: always
  type: bool
ntp_there:
  description: NTP clients that can be started.
  returned: always
  type: list
  elements: str
ntp_masked:
  description: NTP clients that are masked.
  returned: always
  type: list
  elements: str
"""


def ran(*command: str) -> tuple[int, str, str]:
    """Exit status, standard output and errors of a command; 127 where there is none."""
    environment = dict(os.environ, LC_ALL="C.UTF-8")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        return 127, "", str(error.strerror)
    return done.returncode, done.stdout, done.stderr.strip()


def free_at(folder: Path) -> int:
    """Free bytes of a folder's file system."""
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def packages(module: AnsibleModule, names: list[str]) -> tuple[list[str], list[str]]:
    """Which packages are installed, by name and by name=version, and names of those that are held."""
    if not names:
        return [], []
    shape = "--showformat=${db:Status-Status} ${db:Status-Want} ${Package} ${Version}\n"
    status, text, said = ran("dpkg-query", "--show", shape, *names)
    if status not in (0, 1):  # 1: some are not known
        why = "packages are looked for on Debian and Ubuntu only" if status == 127 else said
        module.fail_json(msg=f"dpkg-query ended with {status}: {why}")
    there = [words for line in text.splitlines() if (words := line.split(" "))[0] == "installed"]
    installed = [text for words in there for text in (words[2], f"{words[2]}={words[3]}")]
    return installed, [words[2] for words in there if words[1] == "hold"]


def ntp(units: list[str]) -> dict[str, Any]:
    """Whether an NTP client has to be started, and which could be."""
    show = ("systemctl", "show", "--property=Id,LoadState,ActiveState", *units)
    status, text, _ = ran(*show) if units else (1, "", "")
    lines = [
        [line.split("=", 1) for line in block.splitlines() if "=" in line] for block in text.split("\n\n")
    ]
    blocks = [dict(pairs) for pairs in lines]
    active = any(block.get("ActiveState") == "active" for block in blocks)
    contained = ran("systemd-detect-virt", "--container", "--quiet")[0] == 0
    loaded = {
        state: [block["Id"] for block in blocks if block.get("LoadState") == state]
        for state in ("loaded", "masked")
    }
    return {
        # Below chroot, systemctl says nothing and ends with 0.
        "ntp_due": status == 0 and any(blocks) and not active and not contained,
        "ntp_there": loaded["loaded"],
        "ntp_masked": loaded["masked"],
    }


def main() -> None:
    """Run the module."""
    lists = {name: {"type": "list", "elements": "str", "default": []} for name in ("packages", "ntp_clients")}
    module = AnsibleModule(
        argument_spec={"folder": {"type": "path", "required": True}, **lists}, supports_check_mode=True
    )
    installed, held = packages(module, module.params["packages"])
    module.exit_json(
        changed=False,
        uid=os.geteuid(),
        free=free_at(Path(module.params["folder"])),
        installed=installed,
        held=held,
        **ntp(module.params["ntp_clients"]),
    )


if __name__ == "__main__":
    main()
