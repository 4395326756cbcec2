"""Commands on the hosts of an inventory: the same words as on this machine, host by host."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.board import Board
from toolkit.cli.output import answer, emit, require_yes, say, tell_doubts
from toolkit.cli.plans import confirm_undone, show_ansible, show_plan
from toolkit.errors import ConfigError, ToolkitError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult
    from toolkit.inventory.host import Host
    from toolkit.profile.loading import ResolvedProfile


# Changes that are none where nothing differs, and what is told then.
_ONLY_WITH_CHANGES = {
    "swap": "every key has that value already",
    "upgrade": "it runs on this version and its libraries",
}


@dataclass(frozen=True, slots=True)
class Where:
    """Which hosts, and how many at a time.

    Attributes:
        inventory: inventory files, folders or dynamic sources.
        limit: Ansible host pattern.
        parallel: hosts that are looked at or copied to at the same time.
        batch: hosts that are restarted at the same time.
    """

    inventory: Sequence[Path]
    limit: str | None = None
    parallel: int = 8
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Manner:
    """How a change is made and shown."""

    yes: bool = False
    verbose: bool = False
    as_json: bool = False
    lock_wait: float = 0.0


def where(
    inventory: Sequence[Path] | None, limit: str | None, *, batch: int = 1, parallel: int = 8
) -> Where | None:
    """The hosts that were asked for; None for this machine.

    Raises:
        ConfigError: there is a limit without an inventory.
    """
    if limit is not None and not limit.strip():
        raise ConfigError("--limit is empty: it would mean every host", hint="leave it out if that is meant")
    if inventory:
        return Where(inventory, limit, parallel, batch)
    if limit is not None:
        raise ConfigError("--limit needs an inventory", hint="add -i inventory.yaml")
    return None


def deploy(
    name: str,
    overlays: Sequence[Path],
    sets: Sequence[str],
    where: Where,
    manner: Manner,
    *,
    new_baseline: bool,
    seed: str | None = None,
    wheelhouse: Path | None = None,
    ignored: Sequence[str] = (),
) -> None:
    """Deploy a profile on the hosts that carry it."""
    found = begin_listing(where)
    from toolkit.fleet.bare import equip
    from toolkit.fleet.change import lock_all
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.deploy import (
        bring_weights,
        build,
        deploy_in_turn,
        desired,
        examine,
        plan_everywhere,
        provision,
        untouched,
    )
    from toolkit.fleet.fanout import Spread
    from toolkit.fleet.halt import halted, leaving_out
    from toolkit.fleet.wheels import bring_wheels, check_wheels
    from toolkit.profile.loading import load_profile

    resolved = load_profile(name, overlays=overlays, sets=sets)
    tell_doubts(resolved)
    hosts = carrying(found(), where, resolved.profile.name)
    wanted = desired(resolved, wheelhouse)
    command = f"deploy profile {wanted.service}"
    with Connections(hosts, python=resolved.profile.host.python) as connections:
        names, wait, limit = list(connections.hosts), manner.lock_wait, where.parallel
        out = lock_all(
            connections, names, wanted.service, command, wait=wait, limit=limit, tell=_tell_waiting
        )
        plans = plan_everywhere(wanted, connections, limit=limit, but=out)
        _show_plans(plans, say)
        plans = halted(leaving_out(plans, where.limit), "not begun, since {} could not be planned")
        if all(item.value is None or item.value["plan"]["empty"] for item in plans):
            _end([untouched(item) for item in plans], manner)
            return
        require_yes(yes=manner.yes, as_json=manner.as_json)
        undone = {item.host: item.value["undone"] for item in plans if item.value is not None}
        confirm_undone(undone, yes=manner.yes)
        orders = wanted.orders(connections.hosts)
        check_wheels(orders, plans)
        options = {"lock_wait": manner.lock_wait, "new_baseline": new_baseline, "ignored": list(ignored)}
        with Board([host.name for host in hosts], verbose=manner.verbose) as board:
            plans = examine(
                resolved.profile, wanted, connections, plans, board.tell, ignored=ignored, limit=limit
            )
            plans = provision(wanted, where.inventory, plans, board.tell)
            plans = halted(plans, "not restarted, since provisioning failed on {}")
            plans = bring_wheels(orders, connections.hosts, plans, board.tell, limit=limit)
            plans = equip(
                wanted.bare, wanted.args(), connections, plans, board.tell, command=command, limit=limit
            )
            plans = halted(plans, "not restarted, since the libraries failed on {}")
            spread = Spread(limit, seed)
            plans = bring_weights(
                wanted, connections, plans, board.tell, inventory=where.inventory, spread=spread
            )
            plans = build(wanted, connections, plans, board.tell, limit=limit)
            results = deploy_in_turn(wanted, connections, plans, options, board.tell, batch=where.batch)
    _end(results, manner)


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
    _show_plans(plans, tell)
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


def swap(name: str | None, sets: Sequence[str], where: Where, manner: Manner, **options: Any) -> None:
    """Change keys of the deployed profile, host by host."""
    args = {"sets": list(sets), "lock_wait": manner.lock_wait, **options}

    _change(name, where, manner, "swap", args, preview="swap_preview")


def rollback(
    name: str | None, release: str | None, where: Where, manner: Manner, *, new_baseline: bool
) -> None:
    """Go back to an earlier release, host by host."""
    args = {"release": release, "lock_wait": manner.lock_wait, "new_baseline": new_baseline}

    _change(name, where, manner, "rollback", args, preview="rollback_preview")


def upgrade(
    name: str | None, where: Where, manner: Manner, *, new_baseline: bool, wheelhouse: Path | None = None
) -> None:
    """Serve the deployed profile from a new environment, host by host."""
    args = {"lock_wait": manner.lock_wait, "new_baseline": new_baseline}

    _change(name, where, manner, "upgrade", args, preview="upgrade_preview", wheelhouse=wheelhouse)


def uninstall(name: str | None, where: Where, manner: Manner, *, purge: bool) -> None:
    """Remove a service, host by host."""
    _change(name, where, manner, "uninstall", {"lock_wait": manner.lock_wait, "purge": purge})


def change(name: str | None, verb: str, where: Where, manner: Manner) -> None:
    """Start, stop or restart, host by host."""
    args = {"verb": verb, "lock_wait": manner.lock_wait}
    _change(name, where, manner, "change", args)


def full_test(name: str | None, where: Where, manner: Manner) -> None:
    """Judge at level `full`, host by host."""
    _change(name, where, manner, "full_test", {"lock_wait": manner.lock_wait})


def look(
    name: str | None,
    operation: str,
    args: dict[str, Any],
    where: Where,
    begun: Callable[[str], object] = lambda _: None,
    found: Callable[[], list[Host]] | None = None,
) -> list[HostResult]:
    """A reading command on all hosts at once; hosts that carry nothing are left out.

    Without a name, `begun` is told of each host on which a first deploy was begun and not finished. `found`
    waits for an inventory that is being read already.
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
                return connections.call(host, operation, {"service": name, **args})
            except NotReadyError as error:
                if name is not None:
                    raise
                if error.begun:
                    begun(host)
                return []  # nothing was ever deployed there

        return at_once([host.name for host in hosts], ask, limit=where.parallel)


def stream(name: str | None, where: Where, *, lines: int, follow: bool) -> None:
    """The server's output; with several hosts each line has its host in front."""
    found = begin_listing(where)
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.many import at_once

    service = service_of(name, where, found)
    hosts = carrying(found(), where, service)
    width = max(len(host.name) for host in hosts)
    with Connections(hosts) as connections:

        def one(host: str) -> None:
            front = f"{host:<{width}}  " if len(hosts) > 1 else ""
            args = {"service": service, "lines": lines, "follow": follow}
            connections.call(
                host, "logs", args, lambda message: typer.echo(f"{front}{message.get('line', '')}")
            )

        results = at_once([host.name for host in hosts], one, limit=len(hosts))
    show_errors(results)
    _exit(results)


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
    _exit(results)


def _change(
    name: str | None,
    where: Where,
    manner: Manner,
    operation: str,
    args: dict[str, Any],
    *,
    preview: str | None = None,
    wheelhouse: Path | None = None,
) -> None:
    found = begin_listing(where)
    from toolkit.fleet.begun import for_begun
    from toolkit.fleet.change import change_in_turn, lock_all
    from toolkit.fleet.connections import Connections
    from toolkit.fleet.drain import drained, undrained
    from toolkit.fleet.many import at_once
    from toolkit.fleet.upgrade import Libraries

    service = service_of(name, where, found)
    hosts = carrying(found(), where, service)
    names = [host.name for host in hosts]
    require_yes(yes=manner.yes, as_json=manner.as_json)
    with Connections(hosts) as connections:
        libraries = None
        if operation == "upgrade":
            libraries = Libraries(wheelhouse, connections.hosts, where.parallel)
        words, limit = _words(operation, args), where.parallel
        wait = manner.lock_wait
        out = lock_all(connections, names, service, words, wait=wait, limit=limit, tell=_tell_waiting)
        names = [host for host in names if host not in {item.host for item in out}]
        wanted = {"service": service, **args}
        out = for_begun(out, operation, args, connections.hosts, limit)
        unfelt: set[str] = set()  # hosts whose server runs on
        if preview is not None:
            previews = at_once(
                names, lambda host: connections.call(host, preview, wanted), limit=where.parallel
            )
            if libraries is not None:
                previews = libraries.planned(previews)
            _show_changes(operation, service, previews)
            out += [item for item in previews if item.value is None]
            # What is asked for must be right on every host before the first is touched.
            if any(item.exit_code == ConfigError.exit_code for item in previews):
                _end(out, manner)
                return
            names = [item.host for item in previews if item.ok and _changes_something(operation, item)]
            unfelt = {item.host for item in previews if item.ok and not item.value.get("restarts", True)}
            if libraries is not None:
                libraries.check(previews)
        with Board([host.name for host in hosts], verbose=manner.verbose) as board:
            if libraries is not None:
                previews = libraries.bring([item for item in previews if item.host in names], board.tell)
                out += [item for item in previews if not item.ok]
                names = [item.host for item in previews if item.ok]

            def work(host: str) -> Any:
                def run() -> Any:
                    tell = partial(board.tell, host)
                    return connections.change(host, operation, wanted, tell)

                # What starts is out of the load balancer already.
                if host in unfelt:
                    return run()
                around = undrained if args.get("verb") == "start" else drained
                serves = partial(connections.serves, host, service)
                return around(connections.hosts[host], run, serves, board.tell)

            results = change_in_turn([connections.hosts[host] for host in names], work, batch=where.batch)
    _end([*out, *results], manner)


def _tell_waiting(host: str, message: dict[str, Any]) -> None:
    """Say who is waited for; no board is up yet."""
    if "step" in message:
        say(f"{host}: {message['step'][1]}")


def _changes_something(operation: str, preview: HostResult) -> bool:
    return operation not in _ONLY_WITH_CHANGES or bool(preview.value["changes"])


def _words(operation: str, args: dict[str, Any]) -> str:
    """The command, as the lock shows it to others."""
    return " ".join([args.get("verb", operation), *(f"--set {item}" for item in args.get("sets", ()))])


def service_of(name: str | None, where: Where, found: Callable[[], list[Host]]) -> str:
    """The service that a command on hosts is about: the named one, or the only one that they carry.

    Raises:
        ConfigError: none is named, and the hosts carry several or none.
    """
    if name is not None:
        return name
    from toolkit.inventory.host import only_profile

    return only_profile(found(), limit=where.limit)


def begin_listing(where: Where) -> Callable[[], list[Host]]:
    """Begin to read the inventory: Ansible takes a while in a process of its own, which imports here can use.

    Returns:
        Waits for the hosts; raises what reading them raised.
    """
    answers: queue.SimpleQueue[list[Host] | BaseException] = queue.SimpleQueue()

    def read() -> None:
        from toolkit.inventory.load import load_hosts

        try:
            answers.put(load_hosts(where.inventory, limit=where.limit))
        except BaseException as error:  # raised where the hosts are waited for
            answers.put(error)

    threading.Thread(target=read, daemon=True).start()

    @cache
    def wait() -> list[Host]:
        found = answers.get()
        if isinstance(found, BaseException):
            raise found
        return found

    return wait


def carrying(hosts: Sequence[Host], where: Where, profile: str) -> list[Host]:
    """Those of the hosts that carry the profile.

    Raises:
        ConfigError: none does.
    """
    from toolkit.inventory.host import hosts_with

    return hosts_with(hosts, profile, limit=where.limit)


def _show_plans(plans: Sequence[HostResult], tell: Callable[[str], None]) -> None:
    for item in plans:
        if item.value is not None:
            show_plan(item.value["plan"], item.host, tell)


def _show_changes(operation: str, service: str, previews: Sequence[HostResult]) -> None:
    """The diff, once for all hosts that have the same."""
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for item in previews:
        if item.value is not None:
            felt = item.value.get("restarts", True)
            groups.setdefault((tuple(item.value["changes"]), felt), []).append(item.host)
    for (changes, felt), hosts in groups.items():
        if not changes and operation in _ONLY_WITH_CHANGES:
            say(f"{', '.join(hosts)}: nothing to do, {_ONLY_WITH_CHANGES[operation]}")
            continue
        say(
            f"{operation} of {service} on {', '.join(hosts)}, {'one restart each' if felt else 'no restart'}:"
        )
        for line in changes:
            say(f"  {line}")
    for item in previews:
        if item.value is not None and not item.value["changes"] and "hint" in item.value:
            say(f"  {item.host}: {item.value['hint']}")


def show_errors(results: Sequence[HostResult]) -> None:
    """Say what went wrong, host by host."""
    for item in results:
        if item.error is not None:
            _error(item.host, item.error)


def _error(host: str, error: ToolkitError) -> None:
    for line in error.message.splitlines():
        say(f"error: {line if host in line else f'{host}: {line}'}")
    if error.hint:
        say(f"  next: {error.hint}")


def _end(results: Sequence[HostResult], manner: Manner) -> None:
    """Say how it ended on each host, and exit with the worst of it."""
    from toolkit.fleet.results import to_json

    if manner.as_json:
        emit(to_json(results))
    for item in results:
        if item.skipped:
            say(f"{item.host}: {item.skipped}")
        elif item.error is not None:
            _error(item.host, item.error)
        elif item.value and item.value.get("outcome"):
            _outcome(item.host, item.value)
    _exit(results)


def _outcome(host: str, value: dict[str, Any]) -> None:
    from toolkit.cli.progress import downtime_words

    outcome = value["outcome"]
    for line in outcome["log"]:
        say(f"  {host} | {line}")
    tail = downtime_words(outcome)
    say(f"{host}: {outcome['kind']}: {outcome['status'].replace('_', ' ')}: {outcome['message']}{tail}")
    lengths = (value.get("report") or {}).get("acceptance_length") or {}
    if outcome["serving"] and (tree := lengths.get("tree")):
        say(
            f"  acceptance length {tree['value']:.2f}; {value['url']} on the host, release {value['release']}"
        )
    if outcome["hint"]:
        say(f"  next: {outcome['hint']}")


def _exit(results: Sequence[HostResult]) -> None:
    from toolkit.fleet.results import worst

    if code := worst(results):
        raise typer.Exit(code)
