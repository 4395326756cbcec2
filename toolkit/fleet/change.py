"""A change of one service on many hosts: the lock on all of them first, then one host after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolkit.errors import StoppedWatchingError, ToolkitError, UnreachableError
from toolkit.fleet.connections import Connections
from toolkit.fleet.drain import Balancer, TellHost, exit_code_of
from toolkit.fleet.many import at_once, in_turn
from toolkit.fleet.results import HostResult
from toolkit.inventory.commands import command as given
from toolkit.inventory.host import Host
from toolkit.remote.agent import NotReadyError


def lock_all(
    connections: Connections,
    names: Sequence[str],
    service: str,
    command: str,
    *,
    wait: float,
    limit: int,
    tell: TellHost | None = None,
    profile: dict[str, Any] | None = None,
    stops: bool = False,
) -> list[HostResult]:
    """Take a service's lock on all hosts that can be reached, or on none.

    Args:
        connections: the hosts' agents, which keep the locks until they end.
        names: the hosts.
        service: name of the service.
        command: what is done, shown to whoever finds the service locked.
        wait: seconds to wait for each lock.
        limit: hosts that are connected to at the same time.
        tell: told who is waited for, and how long yet.
        profile: what is to be deployed, if that is what is done.
        stops: the service is to be stopped: on a host alone, what was interrupted there is ended without
            starting anything. With others that is not certain to come to it.

    Returns:
        A result for each host that must not be touched; those that cannot be reached keep no other one back.
    """
    out = []
    opened = {item.host: item.error for item in at_once(names, connections.open, limit=limit)}
    # Always in the same order, so that two commands cannot wait for each other.
    for name in sorted(names):
        try:
            if (error := opened[name]) is not None:
                raise error
            heard = None if tell is None else partial(tell, name)
            stopping = stops and len(names) == 1
            connections.reserve(
                name, service, command, wait=wait, tell=heard, profile=profile, stopping=stopping
            )
        except (UnreachableError, NotReadyError) as error:
            out.append(HostResult(name, error=error))
        except ToolkitError as error:
            return [
                HostResult(other, error=error)
                if other == name
                else HostResult(other, skipped=f"not begun, since {name} could not be locked")
                for other in names
            ]
    return out


def change_in_turn(
    hosts: Sequence[Host], work: Callable[[str], Any], service: str, balancer: Balancer, *, batch: int
) -> list[HostResult]:
    """Make a change on hosts, `batch` at a time; after a failure no further host is begun.

    Args:
        hosts: the hosts.
        work: changes one host; what it gives has an `outcome`.
        service: name of the service.
        balancer: what `work` drains hosts with.
        batch: hosts that are changed at the same time.

    Raises:
        StoppedWatchingError: the user interrupted the command.
    """
    try:
        return in_turn([host.name for host in hosts], work, batch=batch, grade=exit_code_of)
    except StoppedWatchingError:
        said = "interrupted; a change that had begun goes on on its host by itself"
        hint = given(hosts, f"status {service}")
        if out := [host for host in hosts if host.name in balancer.out]:
            said += f"; drained, and not put back: {', '.join(host.name for host in out)}"
            hint += f"; once it has ended, this puts back what serves: {given(out, f'start {service}')}"
        raise StoppedWatchingError(said, hint=hint) from None
