"""Changes of a deployed service on the hosts of an inventory, host by host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.board import Board
from toolkit.cli.fleet.shown import (
    ONLY_WITH_CHANGES,
    finish,
    show_changes,
    tell_waiting,
)
from toolkit.cli.fleet.where import Manner, Where, begin_listing, carrying, service_of
from toolkit.cli.output import require_yes
from toolkit.cli.plans import confirm_loss
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult


def swap(name: str | None, sets: Sequence[str], where: Where, manner: Manner, **options: Any) -> None:
    """Change keys of the deployed profile, host by host."""
    args = {"sets": list(sets), "lock_wait": manner.lock_wait, **options}

    _change(name, where, manner, "swap", args, preview="swap_preview")


def rollback(
    name: str | None,
    release: str | None,
    where: Where,
    manner: Manner,
    *,
    new_baseline: bool,
    refused: bool = False,
) -> None:
    """Go back to an earlier release, host by host."""
    args = {
        "release": release,
        "lock_wait": manner.lock_wait,
        "new_baseline": new_baseline,
        "refused": refused,
    }

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
    from toolkit.fleet.drain import Balancer
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
        stops = operation == "uninstall" or args.get("verb") == "stop"
        out = lock_all(
            connections, names, service, words, wait=wait, limit=limit, tell=tell_waiting, stops=stops
        )
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
            _confirm_changes(operation, service, previews, manner)
            out += [item for item in previews if item.value is None]
            # What is asked for must be right on every host before the first is touched.
            if any(item.exit_code == ConfigError.exit_code for item in previews):
                finish(out, manner)
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

            balancer = Balancer(board.tell)

            def work(host: str) -> Any:
                def run() -> Any:
                    tell = partial(board.tell, host)
                    return connections.change(host, operation, wanted, tell)

                # What starts is out of the load balancer already.
                if host in unfelt:
                    return run()
                around = balancer.undrained if args.get("verb") == "start" else balancer.drained
                serves = partial(connections.serves, host, service)
                return around(connections.hosts[host], run, serves)

            chosen = [connections.hosts[host] for host in names]
            results = change_in_turn(chosen, work, service, balancer, batch=where.batch)
    finish([*out, *results], manner)


def _confirm_changes(operation: str, service: str, previews: Sequence[HostResult], manner: Manner) -> None:
    show_changes(operation, service, previews)
    losing = [item.host for item in previews if item.value and item.value.get("loses")]
    confirm_loss(losing, service, yes=manner.yes)


def _changes_something(operation: str, preview: HostResult) -> bool:
    return operation not in ONLY_WITH_CHANGES or bool(preview.value["changes"])


def _words(operation: str, args: dict[str, Any]) -> str:
    """The command, as the lock shows it to others."""
    return " ".join([args.get("verb", operation), *(f"--set {item}" for item in args.get("sets", ()))])
