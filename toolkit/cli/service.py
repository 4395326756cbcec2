"""status, logs, start, stop, restart, lock."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from toolkit.cli import fleet
from toolkit.cli.options import Batch, Inventories, Json, Limit, LockWait, ServiceName, Verbose, Yes
from toolkit.cli.output import answer, emit, emit_line, require_yes, say, table
from toolkit.errors import EXIT_INTERRUPTED, ConfigError, StoppedWatchingError

Verb = Literal["start", "stop", "restart"]

lock_app = typer.Typer(help="Show or release the lock.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("start")(start)
    app.command("stop")(stop)
    app.command("restart")(restart)
    app.add_typer(lock_app, name="lock")


def _change(name: str | None, verb: Verb, where: fleet.Where | None, manner: fleet.Manner) -> None:

    if where is not None:
        fleet.change(name, verb, where, manner)
        return
    from toolkit.cli.progress import Lines, finish
    from toolkit.release import control
    from toolkit.release.locate import find_service

    service = find_service(name)
    require_yes(yes=manner.yes, as_json=manner.as_json)
    change = {"start": control.start, "stop": control.stop, "restart": control.restart}[verb]
    watcher = Lines(verbose=manner.verbose).watcher()
    outcome = change(
        service.layout, service.name, wait=manner.lock_wait, on_event=watcher.event, on_wait=watcher.waiting
    )
    if manner.as_json:
        emit({"ok": outcome.exit_code == 0, "service": service.name, "outcome": outcome.to_json()})
    finish(outcome)


def start(
    name: ServiceName = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Start the current release and wait for real tokens."""
    where = fleet.where(inventory, limit, batch=batch)
    _change(name, "start", where, fleet.Manner(yes, verbose, as_json, lock_wait))


def stop(
    name: ServiceName = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Stop the service; it stays stopped."""
    where = fleet.where(inventory, limit, batch=batch)
    _change(name, "stop", where, fleet.Manner(yes, verbose, as_json, lock_wait))


def restart(
    name: ServiceName = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Restart the current release and wait for real tokens."""
    where = fleet.where(inventory, limit, batch=batch)
    _change(name, "restart", where, fleet.Manner(yes, verbose, as_json, lock_wait))


def logs(
    name: ServiceName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines to begin with.")] = 50,
    inventory: Inventories = None,
    limit: Limit = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON on standard output; with -f an object a line.")
    ] = False,
) -> None:
    """Print the server's output."""
    where = fleet.where(inventory, limit)
    if where is not None:
        fleet.stream(name, where, lines=lines, follow=follow, as_json=as_json)
        return
    from toolkit.release.control import logs as read_logs
    from toolkit.release.locate import find_service

    service = find_service(name)
    found = read_logs(service.layout, service.name, lines=lines, follow=follow)
    try:
        if as_json and not follow:
            emit({"service": service.name, "lines": list(found)})
            return
        for line in found:
            if as_json:
                emit_line({"line": line})
            else:
                answer(line)
    except StoppedWatchingError:
        # The usual way to end it, so nothing is said.
        raise typer.Exit(EXIT_INTERRUPTED) from None


def status(
    name: ServiceName = None, inventory: Inventories = None, limit: Limit = None, as_json: Json = False
) -> None:
    """What serves, since when, with which config, and how it does now."""
    where = fleet.where(inventory, limit)
    if where is not None:
        _status_of_hosts(name, where, as_json=as_json)
        return
    from toolkit.deploy.watch import observed

    shown = observed(name)
    if as_json:
        emit(shown)
        return
    if not shown:
        answer(f"no service is deployed here{_begun_here()}")
    for item in shown:
        _show_status(item)


def _begun_here() -> str:
    from toolkit.release.locate import begun_services

    names = ", ".join(service.name for service in begun_services())
    return f"; begun, and not come to a release: {names}" if names else ""


def _status_of_hosts(name: str | None, where: fleet.Where, *, as_json: bool) -> None:
    from toolkit.fleet.results import to_json

    begun: set[str] = set()
    results = fleet.look(name, "status", {}, where, begun.add)
    if as_json:
        emit(to_json(results))
    else:
        for result in results:
            for item in result.value or ():
                _show_status({**item, "name": f"{result.host}: {item['name']}"})
            if result.host in begun:
                answer(f"{result.host}: a deploy was begun there, and has not finished")
            elif result.value == []:
                answer(f"{result.host}: no service is deployed there")
    fleet.finish_looking(results)


def _show_status(item: dict[str, Any]) -> None:
    from toolkit.deploy.watch import describe_status

    rows = table("", "")
    rows.show_header = False
    for label, value in describe_status(item):
        rows.add_row(label, value)
    answer(f"{item['name']}:")
    answer(rows)


@lock_app.command("show")
def lock_show(
    name: ServiceName = None, inventory: Inventories = None, limit: Limit = None, as_json: Json = False
) -> None:
    """Who holds the lock, since when, and what for."""
    where = fleet.where(inventory, limit)
    if where is not None:
        fleet.show_each(name, "lock_show", {}, where, _show_lock, as_json=as_json)
        return
    from toolkit.hostside.operations import lock_show as look

    found = look({"service": name})
    if as_json:
        emit(found)
    else:
        _show_lock(found)


def _show_lock(found: dict[str, Any]) -> None:
    from toolkit.deploy.watch import age

    name, holder, transaction = found["service"], found["holder"], found["transaction"]
    if transaction is not None:
        step = f"{transaction['kind']} by {transaction['who']} at step {transaction['step']}"
        answer(f"{name}: a transaction runs on the host and ends by itself: {step}")
    if holder is None:
        if transaction is None:
            answer(f"{name}: not locked")
    else:
        held = f"held by {holder['who']}"
        if "since" in holder:
            held += f" for {age(holder['since'])}: {holder['command']}"
        gone = ", which is gone: the next change takes the lock over" if holder["gone"] else ""
        # A claim has none: it ends with its holder, and is not to be released.
        token = f" (token {holder['token']})" if "token" in holder else ""
        answer(f"{name}: {held}{gone}{token}")


@lock_app.command("release")
def lock_release(
    token: Annotated[str | None, typer.Argument(help="The token that `lock show` prints.")] = None,
    name: Annotated[
        str | None, typer.Option("--service", help="The service; the only one by default.")
    ] = None,
    inventory: Inventories = None,
    limit: Limit = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Release a lock whose holder is gone; never ends a running transaction."""
    if token is None:
        of = f" {name}" if name else ""
        raise ConfigError("a lock is released by its token", hint=f"ddtoolkit lock show{of} prints it")
    where = fleet.where(inventory, limit)
    require_yes(yes=yes, as_json=as_json)
    if where is not None:
        args = {"token": token}
        fleet.show_each(name, "lock_release", args, where, _show_released, as_json=as_json, one_host=True)
        return
    from toolkit.hostside.operations import lock_release as release

    found = release({"service": name, "token": token})
    _show_released(found)
    if as_json:
        emit({"ok": True, **found})


def _show_released(found: dict[str, Any]) -> None:
    say(f"{found['service']}: released the lock of {found['freed']['who']}")
