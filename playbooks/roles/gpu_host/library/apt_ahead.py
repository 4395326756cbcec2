"""Ansible module: whether apt can make a change, by its own simulation and by fetching what it takes."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: apt_ahead
short_description: See whether apt could install and remove packages
description:
  - Lets apt simulate the change, as if the named holds were released, and fetches its packages into apt's
    cache.
  - Installs and removes nothing.
options:
  update:
    description: Bring the package lists up to date first; every source has to answer.
    type: bool
    default: false
  install:
    description: Packages to install, as NAME or NAME=VERSION.
    type: list
    elements: str
    default: []
  remove:
    description: Packages to remove.
    type: list
    elements: str
    default: []
  release:
    description: Held packages whose holds are released before the change.
    type: list
    elements: str
    default: []
  lock_timeout:
    description: Seconds to wait for apt's locks.
    type: int
    default: 300
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: It only simulates then, and fetches nothing.
"""

EXAMPLES = r"""
- name: See whether apt can do it
  apt_ahead:
    install: [nvidia-driver-580-server-open=580.95.05-0ubuntu1]
"""

RETURN = r"""
problem:
  description: Why apt cannot make the change; empty if it can.
  returned: always
  type: str
removes:
  description: Packages that apt would remove besides, in favour of those that are installed.
  returned: always
  type: list
  elements: str
"""

STATUS = Path("/var/lib/dpkg/status")
_LIMIT = 1800  # seconds; a driver with the CUDA toolkit is several gigabytes
_TOLD = 600  # characters


def released(status: str, names: Collection[str]) -> str:
    """The status of dpkg with the holds of these packages taken off; other text is left as it is."""
    stanzas = status.split("\n\n")
    for number, stanza in enumerate(stanzas):
        name = re.search(r"^Package: (.+)$", stanza, re.MULTILINE)
        if name is not None and name[1] in names:
            stanzas[number] = re.sub(r"^Status: hold ", "Status: install ", stanza, flags=re.MULTILINE)
    return "\n\n".join(stanzas)


def complaint(output: str, errors: str) -> str:
    """What apt says of a failure: its reasons with packages, then its errors, on one line."""
    _, _, unmet = output.partition("have unmet dependencies:\n")
    reasons = [line.strip() for line in unmet.splitlines() if line.startswith(" ")]
    reasons += [line.removeprefix("E: ") for line in errors.splitlines() if line.startswith("E: ")]
    said = "; ".join(dict.fromkeys(" ".join(reason.split()) for reason in reasons))
    return (said or errors.strip()[-_TOLD:] or "apt-get failed without a reason")[:_TOLD]


def removed(output: str, asked: Collection[str]) -> list[str]:
    """Packages that a simulation removes, without those that are asked for."""
    found = re.findall(r"^(?:Remv|Purg) (\S+)", output, re.MULTILINE)
    return sorted({name.partition(":")[0] for name in found} - set(asked))


def apt(words: Sequence[str], timeout: int) -> subprocess.CompletedProcess[str]:
    """Run apt-get, which waits for its locks."""
    command = [
        "apt-get",
        "-q",
        "-y",
        "-o",
        f"DPkg::Lock::Timeout={timeout}",
        "-o",
        "Acquire::Retries=3",
        *words,
    ]
    environment = dict(os.environ, LC_ALL="C.UTF-8", DEBIAN_FRONTEND="noninteractive")
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=_LIMIT
    )


def rehearse(asked: Mapping[str, Any], *, simulate: bool) -> tuple[str, list[str]]:
    """Let apt simulate a change, as the role's later tasks make it, and fetch what it takes.

    Args:
        asked: the module's parameters.
        simulate: fetch nothing.

    Returns:
        Why it cannot be made, "" where it can; and what is removed besides.
    """
    changes = [*asked["install"], *(f"{name}-" for name in asked["remove"])]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="ddtoolkit-status-") as status:
        status.write(released(STATUS.read_text(encoding="utf-8"), asked["release"]))
        status.flush()
        # Its cache of the package lists is of this status, so it is not kept.
        words = ["-o", f"Dir::State::status={status.name}", "-o", "Dir::Cache::pkgcache="]
        words += ["--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages"]
        done = apt([*words, "--simulate", "install", *changes], asked["lock_timeout"])
        removes = removed(done.stdout, asked["remove"])
        if done.returncode == 0 and not simulate:
            done = apt([*words, "--download-only", "install", *changes], asked["lock_timeout"])
    return "" if done.returncode == 0 else complaint(done.stdout, done.stderr), removes


def main() -> None:
    """Run the module."""
    names = ("install", "remove", "release")
    spec = {name: {"type": "list", "elements": "str", "default": []} for name in names}
    spec |= {"update": {"type": "bool", "default": False}, "lock_timeout": {"type": "int", "default": 300}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    asked = module.params
    problem, removes = "", []
    try:
        if asked["update"] and not module.check_mode:
            done = apt(["--error-on=any", "update"], asked["lock_timeout"])
            problem = "" if done.returncode == 0 else complaint(done.stdout, done.stderr)
        if not problem and (asked["install"] or asked["remove"]):
            problem, removes = rehearse(asked, simulate=module.check_mode)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    module.exit_json(changed=False, problem=problem, removes=removes)


if __name__ == "__main__":
    main()
