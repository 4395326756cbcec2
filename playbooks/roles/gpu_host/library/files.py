"""Ansible module: writes small files of root's, all of a host's at once."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: files
short_description: Write small files of root's
description:
  - Does for a list what M(ansible.builtin.copy) with C(content) does for one, and makes their folders.
    Each call of a module costs a quarter of a second, and M(ansible.builtin.copy) makes two.
  - Ends at the first one that cannot be written; those before it stay.
options:
  files:
    description: The files, in the order in which they are written.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description:
          - Absolute path; a link in its place is replaced. Folders that are not there are made with C(0755).
        type: path
        required: true
      content:
        description: The whole text.
        type: str
        required: true
      mode:
        description: Octal mode.
        type: str
        default: "0644"
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: Tells what would be written or changed.
  diff_mode:
    support: full
    description: Shows it, file by file.
"""

EXAMPLES = r"""
- name: Blacklist nouveau
  files:
    files:
      - {path: /etc/modprobe.d/nouveau.conf, content: "blacklist nouveau\n"}
"""

RETURN = r"""
paths:
  description: Files that were written or changed.
  returned: always
  type: list
  elements: str
"""


def ensured(module: AnsibleModule, file: dict[str, Any]) -> dict[str, Any] | None:
    """Make one file what it is to be; what changed, None where nothing did."""
    path, wanted = Path(file["path"]), file["content"].encode()
    before = content_of(module, path)
    if before != wanted:
        folders = absent_folders(module, path)
        if not module.check_mode:
            write(module, path, wanted, folders)
            attributes(module, file, {})
        return {
            "before_header": str(path), "before": (before or b"").decode("utf-8", "replace"),
            "after_header": str(path), "after": file["content"], "path": str(path),
        }  # fmt: skip
    diff: dict[str, Any] = {"before": {"path": str(path)}, "after": {"path": str(path)}, "path": str(path)}
    return diff if attributes(module, file, diff) else None


def content_of(module: AnsibleModule, path: Path) -> bytes | None:
    """What a regular file holds, as it is: other ends of lines are another text; None for all else."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(kind):
        module.fail_json(msg=f"{path} is a folder, and a file is to be there")
    return path.read_bytes() if stat.S_ISREG(kind) else None


def absent_folders(module: AnsibleModule, path: Path) -> list[Path]:
    """Folders that are to be made for a file, outermost first."""
    absent = [place for place in path.parents if not place.exists()]
    for place in absent:
        if place.is_symlink():
            module.fail_json(msg=f"{place} is a link to nothing, and a folder is to be there")
    return absent[::-1]


def write(module: AnsibleModule, path: Path, content: bytes, folders: list[Path]) -> None:
    """Put a whole file into the place of whatever is there."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    descriptor, new = tempfile.mkstemp(dir=module.tmpdir)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    module.atomic_move(new, str(path))


def attributes(module: AnsibleModule, file: dict[str, Any], diff: dict[str, Any]) -> bool:
    """Give a file its mode and owner; whether it had others."""
    wanted = {"path": file["path"], "mode": file["mode"], "owner": "root", "group": "root"}
    arguments = module.load_file_common_arguments(wanted)
    return bool(module.set_fs_attributes_if_different(arguments, changed=False, diff=diff, expand=False))


def main() -> None:
    """Run the module."""
    options = {
        "path": {"type": "path", "required": True},
        "content": {"type": "str", "required": True},
        "mode": {"type": "str", "default": "0644"},
    }
    module = AnsibleModule(
        argument_spec={"files": {"type": "list", "elements": "dict", "required": True, "options": options}},
        supports_check_mode=True,
    )
    diffs = []
    for file in module.params["files"]:
        try:
            diff = ensured(module, file)
        except OSError as error:
            module.fail_json(msg=f"{error.filename or file['path']}: {error.strerror or error}")
        if diff is not None:
            diffs.append(diff)
    paths = [diff.pop("path") for diff in diffs]
    module.exit_json(changed=bool(diffs), paths=paths, diff=diffs)


if __name__ == "__main__":
    main()
