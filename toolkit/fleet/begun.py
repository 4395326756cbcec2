"""Hosts on which a first deploy was begun, and no agent runs yet: stopping and uninstalling there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.fleet.many import at_once
from toolkit.fleet.results import HostResult
from toolkit.inventory.host import Host
from toolkit.life.begun import MODULE
from toolkit.remote.agent import NotReadyError, run_module


def for_begun(
    results: Sequence[HostResult],
    operation: str,
    args: Mapping[str, Any],
    hosts: Mapping[str, Host],
    limit: int,
) -> list[HostResult]:
    """The results, with what `stop` and `uninstall` come to on such hosts in place of their error.

    Args:
        results: of hosts that no agent could be asked on.
        operation: what is done, with its `args` as the agent's operation takes them.
        args: its arguments.
        hosts: all hosts by name.
        limit: hosts at the same time.
    """
    stops, removes = args.get("verb") == "stop", operation == "uninstall"
    names = [item.host for item in results if isinstance(item.error, NotReadyError) and item.error.begun]
    if not names or not (stops or removes):
        return list(results)
    errors = {item.host: item.error for item in results}

    def one(name: str) -> Any:
        found = run_module(hosts[name], [MODULE, "look"], lambda _: None)
        if found["released"]:
            raise errors[name] or ToolkitError(f"{name}: a release is there")
        if stops:
            return _outcome("stop", "nothing runs there: its first deploy was begun, and came to no release")
        if not args.get("purge"):
            kept = "nothing is removed: its first deploy was begun, and came to no release"
            return _outcome("uninstall", kept, hint="add --purge: it takes back what provisioning made")
        done = run_module(hosts[name], [MODULE, "purge"], lambda _: None)
        message = f"what its first deploy had begun is removed: {len(done['removed'])} things"
        return {**_outcome("uninstall", message), "removed": done["removed"], "kept": done["kept"]}

    found = {item.host: item for item in at_once(names, one, limit=limit)}
    return [found.get(item.host, item) for item in results]


def _outcome(kind: str, message: str, hint: str | None = None) -> dict[str, Any]:
    outcome = {"kind": kind, "status": "committed", "message": message, "hint": hint}
    return {"outcome": {**outcome, "exit_code": 0, "log": [], "serving": None, "seconds": {}}}
