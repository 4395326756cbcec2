"""Ansible module: notes what provisioning adds to a system, so that an uninstall can take just that away."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: provisioned
short_description: Note what provisioning adds to a system
description:
  - With I(state=begin), notes which packages are installed; with I(state=end), the packages that came since,
    those that they depend on included. A run that is cut off between the two is ended by the next one.
  - Keeps the list in a file that C(ddtoolkit uninstall --purge) reads.
options:
  path:
    description: The file.
    type: path
    required: true
  state:
    description: Before or after an installation.
    type: str
    choices: [begin, end]
    required: true
  held:
    description: Packages that were put on hold and were not before.
    type: list
    elements: str
    default: []
  enabled:
    description: Units that were enabled and were not before.
    type: list
    elements: str
    default: []
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: Notes nothing.
"""

EXAMPLES = r"""
- name: Note what is installed before
  provisioned:
    path: /var/lib/ddtoolkit/provisioned.json
    state: begin
"""

RETURN = r"""
packages:
  description: All packages that provisioning installed so far.
  returned: always
  type: list
  elements: str
"""

_QUERY = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\n"]


def installed() -> list[str]:
    """Names of the packages that are installed."""
    shown = subprocess.run(_QUERY, capture_output=True, text=True, check=True).stdout
    return sorted({line.split(" ")[1] for line in shown.splitlines() if line.startswith("installed ")})


def merged(record: dict[str, Any], present: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The record after `begin` or `end`."""
    found = {name: set(record.get(name, ())) for name in ("packages", "held", "enabled")}
    before = record.get("before")
    if given["state"] == "end" and before is not None:
        found["packages"] |= set(present) - set(before)
        before = None
    elif given["state"] == "begin" and before is None:
        before = present
    found["held"] |= set(given["held"])
    found["enabled"] |= set(given["enabled"])
    after: dict[str, Any] = {name: sorted(values) for name, values in found.items()}
    return after if before is None else {**after, "before": before}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["begin", "end"], "required": True},
            "held": {"type": "list", "elements": "str", "default": []},
            "enabled": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        record = {}
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"{path}: {error}; remove it, what it listed stays installed then")
    after = merged(record, installed(), module.params)
    if after != record and any(after.values()) and not module.check_mode:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(after) + "\n", encoding="utf-8")
        temporary.chmod(0o600)
        temporary.replace(path)
    module.exit_json(changed=False, packages=after["packages"])


if __name__ == "__main__":
    main()
