"""Reading commands on the hosts of an inventory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.fleet.shown import (
    exit_with_worst,
    show_errors,
    show_plans,
)
from toolkit.cli.fleet.where import Where, begin_listing, carrying, service_of
from toolkit.cli.output import answer, emit, emit_line, say, tell_doubts
from toolkit.cli.plans import show_ansible
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult
    from toolkit.inventory.host import Host
    from toolkit.profile.loading import ResolvedProfile


def look(
    name: str | None,
    operation: str,
    args: dict[str, Any] | Callable[[Callable[..., Any]], dict[str, Any]],
    where: Where,
    begun: Callable[[str], object] = lambda _: None,
    found: Callable[[], list[Host]] | None = None,
) -> list[HostResult]:
    """A reading command on all hosts at once; hosts that carry nothing are left out.

    Without a name, `begun` is told of each host on which a first deploy was begun and not finished. `found`
    waits for an inventory that is being read already. `args` may be a function of what asks the host.
    """
    found = found or begin_listing(where)
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.many import at_once
    from toolkit.remote.agent import NotReadyError

    hosts = carrying(found(), where, name) if name else [host for host in found() if host.profiles]
    if not hosts:
        raise ConfigError("no host of the inventory lists any profile in ddtoolkit_profiles")
    with Connections(hosts) as connections:

        def ask(host: str) -> Any:
            try:
                asked = args(partial(connections.call, host)) if callable(args) else args
                return connections.call(host, operation, {"service": name, **asked})
            except NotReadyError as error:
                if name is not None:
                    raise
                if error.begun:
                    begun(host)
                return []  # nothing was ever deployed there

        return at_once([host.name for host in hosts], ask, limit=where.parallel)


def show_each(
    name: str | None,
    operation: str,
    args: dict[str, Any],
    where: Where,
    show: Callable[[dict[str, Any]], None],
    *,
    as_json: bool = False,
    one_host: bool = False,
) -> None:
    """A reading command whose answer is about one service of each host.

    Raises:
        ConfigError: it is not said which service, or `one_host` and the pattern matches several.
    """
    from toolkit.fleet.results import to_json

    found = begin_listing(where)
    service = service_of(name, where, found)
    if one_host and len(hosts := carrying(found(), where, service)) > 1:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(f"this concerns one host; several match: {names}", hint="add --limit HOST")
    results = look(service, operation, args, where, found=found)
    if as_json:
        emit(to_json(results))
    else:
        for result in results:
            if result.value is not None:
                answer(f"{result.host}:")
                show(result.value)
    finish_looking(results)


def finish_looking(results: Sequence[HostResult]) -> None:
    """Say what went wrong where, and exit with the worst of it."""
    show_errors(results)
    exit_with_worst(results)


def stream(name: str | None, where: Where, *, lines: int, follow: bool, as_json: bool = False) -> None:
    """The server's output; with several hosts each line has its host in front.

    As JSON it is one document, or, where it goes on, an object a line with `host` and `line`.
    """
    found = begin_listing(where)
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.many import at_once
    from toolkit.fleet.results import to_json

    service = service_of(name, where, found)
    hosts = carrying(found(), where, service)
    width = max(len(host.name) for host in hosts)
    with Connections(hosts) as connections:

        def one(host: str) -> dict[str, Any]:
            front = f"{host:<{width}}  " if len(hosts) > 1 else ""
            kept: list[str] = []

            def heard(message: dict[str, Any]) -> None:
                line = message.get("line", "")
                if not as_json:
                    answer(f"{front}{line}")
                elif follow:
                    emit_line({"host": host, "line": line})
                else:
                    kept.append(line)

            connections.call(host, "logs", {"service": service, "lines": lines, "follow": follow}, heard)
            return {"service": service, "lines": kept}

        results = at_once([host.name for host in hosts], one, limit=len(hosts))
    if as_json and not follow:
        emit(to_json(results))
    finish_looking(results)


def plan(
    name: str,
    overlays: Sequence[Path],
    sets: Sequence[str],
    where: Where,
    *,
    wheelhouse: Path | None = None,
    check: bool = False,
    as_json: bool = False,
) -> bool:
    """Show what a deploy would do on each host; whether there is something to do, by it or by hand."""
    found = begin_listing(where)
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.deploy import desired, plan_everywhere, preview
    from toolkit.fleet.results import to_json, worst
    from toolkit.profile.loading import load_profile

    resolved = load_profile(name, overlays=overlays, sets=sets)
    tell_doubts(resolved)
    hosts = carrying(found(), where, resolved.profile.name)
    wanted, tell = desired(resolved, wheelhouse), say if as_json else answer
    with Connections(hosts, python=resolved.profile.host.python) as connections:
        plans = plan_everywhere(wanted, connections, limit=where.parallel)
    show_plans(plans, tell)
    if check:
        plans = preview(wanted, where.inventory, plans)
        for item in plans:
            if item.value is not None:
                show_ansible(item.value["ansible"], item.host, tell)
    show_errors(plans)
    if as_json:
        emit({**to_json(plans), "overrides": [item.to_json() for item in resolved.overrides]})
    if code := worst(plans):
        raise typer.Exit(code)
    return any(not item.value["plan"]["empty"] or item.value["plan"]["by_hand"] for item in plans)


def render(resolved: ResolvedProfile, where: Where, form: str) -> dict[str, Any]:
    """The unit as a deploy would write it on a host.

    Returns:
        `content` and `notes`, as `toolkit.deploy.rendering.Rendered` has them.

    Raises:
        ConfigError: several hosts carry the profile.
        ToolkitError: the host cannot be asked.
    """
    found = begin_listing(where)
    from toolkit.fleet.connections import Connections

    profile = resolved.profile
    hosts = carrying(found(), where, profile.name)
    if len(hosts) > 1:
        raise ConfigError(f"this is about one host, and {len(hosts)} match", hint="add --limit HOST")
    with Connections(hosts, python=profile.host.python) as connections:
        args = {"profile": resolved.data, "form": form}
        answered: dict[str, Any] = connections.call(hosts[0].name, "render", args)
        return answered
