"""The change that is under way on a service, as its journal and its lock tell; nothing here changes it."""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError
from toolkit.release.controller import result
from toolkit.release.host import ServiceHost
from toolkit.release.journal import read_journal
from toolkit.release.request import read_request

DEPLOYING = "deploying"
_FIRST = "deploy"


def transaction_of(host: ServiceHost) -> dict[str, Any] | None:
    """The running, interrupted or last transaction; None without any.

    Returns:
        `id`, `kind`, `who`, `release`, `base`; `state`: `running`, `interrupted` or `ended`; `first`: whether
        there was nothing before; `began` and `step_began`: seconds since the epoch, None before the first
        step; `step`; `doing`: the step in words; `message` and `outcome`.
    """
    folder = host.paths.transaction
    try:
        request = read_request(folder)
    except ToolkitError:
        return None
    events = read_journal(folder)
    begun = [event for event in events if event.state == "begin"]
    outcome = result(folder)
    state = "running" if outcome is None else ("interrupted" if outcome.status == "interrupted" else "ended")
    return {
        "id": request.id,
        "kind": request.kind,
        "who": request.who,
        "release": request.release,
        "base": request.base,
        "state": state,
        "first": request.kind == _FIRST and request.base is None,
        "began": events[0].time if events else None,
        "step": events[-1].step if events else None,
        "step_began": begun[-1].time if begun else None,
        "doing": begun[-1].message if begun else "",
        "message": outcome.message if outcome else (events[-1].message if events else ""),
        "outcome": outcome.status if outcome else None,
    }


def unsettled(host: ServiceHost) -> str | None:
    """A change that runs or was interrupted, in words; until it has ended, what is current may not stay."""
    found = transaction_of(host)
    if found is None or found["state"] == "ended":
        return None
    state = "runs" if found["state"] == "running" else "was interrupted and will be finished or reversed"
    return f"a {found['kind']} by {found['who']} {state}: the release that is current is not accepted yet"


def first_deploy_since(transaction: dict[str, Any] | None, lock: dict[str, Any] | None) -> float | None:
    """When the first deploy that is under way was begun, seconds since the epoch; None where none is.

    Args:
        transaction: of `transaction_of`.
        lock: `command`, `since` and `stale` of the holder; before the transaction it alone tells.
    """
    if lock is not None and not lock["stale"] and lock["command"].partition(" ")[0] == _FIRST:
        return float(lock["since"])
    if transaction is not None and transaction["state"] == "running" and transaction["first"]:
        return float(transaction["began"] or 0.0) or None
    return None
