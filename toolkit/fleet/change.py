"""A change of one service on many hosts: the lock on all of them first, then one host after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.fleet.connections import Connections
from toolkit.fleet.drain import exit_code_of
from toolkit.fleet.many import in_turn
from toolkit.fleet.results import HostResult


def change_in_turn(
    connections: Connections,
    names: Sequence[str],
    work: Callable[[str], Any],
    *,
    service: str,
    command: str,
    lock_wait: float,
    batch: int,
) -> list[HostResult]:
    """Make a change on hosts, `batch` at a time; after a failure no further host is begun.

    Args:
        connections: the hosts' agents, which keep the locks until they end.
        names: the hosts.
        work: changes one host; what it gives has an `outcome`.
        service: name of the service.
        command: what is done, shown to whoever finds the service locked.
        lock_wait: seconds to wait for each lock.
        batch: hosts that are changed at the same time.

    Returns:
        A result for each name. Where a lock cannot be had, that host has the error and no host is touched.
    """
    # Always in the same order, so that two commands cannot wait for each other.
    for name in sorted(names):
        try:
            connections.reserve(name, service, command, wait=lock_wait)
        except ToolkitError as error:
            return [
                HostResult(other, error=error)
                if other == name
                else HostResult(other, skipped=f"not begun, since {name} could not be locked")
                for other in names
            ]
    return in_turn(names, work, batch=batch, grade=exit_code_of)
