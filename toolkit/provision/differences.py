"""Ansible's own differences (`--diff`) as text.

Source: the 'diff' return value of modules, docs.ansible.com, "Validating tasks: check mode and diff mode".
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

_MOST = 200  # lines of one difference


def diff_text(result: Mapping[str, Any]) -> str:
    """What a task changed, as unified diffs; "" where Ansible tells nothing.

    Args:
        result: the task's result; its `diff`, or that of each item of a loop, is one difference or a list of
            them. Each has `before` and `after`, which are text or a mapping, or `prepared`, a diff already.
    """
    parts = [item for item in result.get("results") or [result] if isinstance(item, Mapping)]
    found = [part["diff"] for part in parts if part.get("diff") and part.get("changed", True)]
    every = [item for diff in found for item in (diff if isinstance(diff, list) else [diff])]
    lines = [line for item in every if isinstance(item, Mapping) for line in _lines(item)]
    if len(lines) > _MOST:
        lines = [*lines[:_MOST], f"... {len(lines) - _MOST} more lines"]
    return "\n".join(lines)


def _lines(item: Mapping[str, Any]) -> list[str]:
    if "prepared" in item:
        return str(item["prepared"]).splitlines()
    before, after = (_text(item.get(side)).splitlines() for side in ("before", "after"))
    old, new = (str(item.get(f"{side}_header") or side) for side in ("before", "after"))
    return list(difflib.unified_diff(before, after, old, new, n=3, lineterm=""))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True)
