"""Ansible module: creates folders with their modes and owners, all of a host's at once."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: folders
short_description: Create folders with their modes and owners
description:
  - Does for a list what M(ansible.builtin.file) with C(state=directory) and C(follow=false) does for one.
    Each call of a module costs a quarter of a second.
  - Ends at the first one that cannot be made; those before it stay.
options:
  folders:
    description: The folders, parents first.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path. Parents that are not there are made with the same mode and owner.
        type: path
        required: true
      mode:
        description: Octal mode, such as C(0755).
        type: str
        required: true
      owner:
        description: User who owns it, with the group of that name; left as it is by default.
        type: str
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: Tells what would be made or changed.
  diff_mode:
    support: full
    description: Shows it, folder by folder.
"""

EXAMPLES = r"""
- name: Create folders
  folders:
    folders:
      - {path: /opt/ddtoolkit, mode: "0755", owner: root}
"""

RETURN = r"""
paths:
  description: Folders that were made or changed.
  returned: always
  type: list
  elements: str
"""


def ensured(module: AnsibleModule, folder: dict[str, Any]) -> dict[str, Any] | None:
    """Make one folder what it is to be; what changed, None where nothing did."""
    path = Path(folder["path"])
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        diff = {"before": {"path": str(path), "state": "absent"}, "after": {"path": str(path)}}
        diff["after"]["state"] = "directory"
        if not module.check_mode:
            for absent in reversed([place for place in (path, *path.parents) if not place.exists()]):
                absent.mkdir(exist_ok=True)
                attributes(module, folder, absent, diff)
        return diff
    if not stat.S_ISDIR(kind):
        module.fail_json(msg=f"{path} already exists and is no folder")
    diff = {"before": {"path": str(path)}, "after": {"path": str(path)}}
    return diff if attributes(module, folder, path, diff) else None


def attributes(module: AnsibleModule, folder: dict[str, Any], path: Path, diff: dict[str, Any]) -> bool:
    """Give a folder its mode and owner; whether it had others."""
    wanted = {"path": str(path), "mode": folder["mode"], "owner": folder["owner"], "group": folder["owner"]}
    arguments = module.load_file_common_arguments(wanted)
    return bool(module.set_fs_attributes_if_different(arguments, changed=False, diff=diff, expand=False))


def main() -> None:
    """Run the module."""
    options = {
        "path": {"type": "path", "required": True},
        "mode": {"type": "str", "required": True},
        "owner": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={"folders": {"type": "list", "elements": "dict", "required": True, "options": options}},
        supports_check_mode=True,
    )
    diffs = []
    for folder in module.params["folders"]:
        try:
            diff = ensured(module, folder)
        except OSError as error:
            module.fail_json(msg=f"{error.filename or folder['path']}: {error.strerror or error}")
        if diff is not None:
            diffs.append(diff)
    paths = [diff["after"]["path"] for diff in diffs]
    module.exit_json(changed=bool(diffs), paths=paths, diff=diffs)


if __name__ == "__main__":
    main()
