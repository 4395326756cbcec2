"""upgrade, prune, uninstall."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import fleet
from toolkit.cli.options import (
    Batch,
    Inventories,
    Json,
    Limit,
    LockWait,
    NewBaseline,
    ServiceName,
    Verbose,
    Wheelhouse,
    Yes,
)
from toolkit.cli.output import answer, confirm, emit, require_yes, say
from toolkit.errors import ConfigError, StoppedWatchingError

if TYPE_CHECKING:
    from toolkit.deploy.watcher import Watcher
    from toolkit.release.locate import Deployed
    from toolkit.release.store import Release


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("upgrade")(upgrade)
    app.command("prune")(prune)
    app.command("uninstall")(uninstall)


def upgrade(
    name: ServiceName = None,
    new_baseline: NewBaseline = False,
    wheelhouse: Wheelhouse = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Serve the deployed profile from this version and its libraries; judged, then kept or undone."""
    where = fleet.where(inventory, limit, batch=batch)
    if where is not None:
        manner = fleet.Manner(yes, verbose, as_json, lock_wait)
        fleet.upgrade(name, where, manner, new_baseline=new_baseline, wheelhouse=wheelhouse)
        return
    from toolkit.cli.progress import Lines, finish, show_report
    from toolkit.deploy.judging import Judging
    from toolkit.deploy.upgrade import upgrade as run
    from toolkit.deploy.upgrade import upgrade_changes
    from toolkit.release.locate import current_release, find_service

    service = find_service(name)
    require_yes(yes=yes, as_json=as_json)
    watcher, outcome = Lines(verbose=verbose).watcher(), None
    with watcher.reserve(service, "upgrade", wait=lock_wait):
        current = current_release(service)
        changes = upgrade_changes(service, current)
        for line in changes or ["nothing to do, it runs on this version and its libraries"]:
            say(f"{service.name}: {line}")
        if changes:
            _bring_wheels(service, current, wheelhouse, watcher)
            judging = Judging(new_baseline=new_baseline)
            outcome = run(service, watcher, lock_wait=lock_wait, judging=judging)
    if as_json:
        shown = None if outcome is None else outcome.to_json()
        ok = outcome is None or outcome.exit_code == 0
        emit({"ok": ok, "service": service.name, "changes": changes, "outcome": shown})
    if outcome is not None:
        show_report(outcome)
        finish(outcome)


def _bring_wheels(service: Deployed, current: Release, wheelhouse: Path | None, watcher: Watcher) -> None:
    """Fill the store here with what an upgrade takes, as a deploy does, and look at where they come from."""
    from toolkit.build.for_profile import lacking
    from toolkit.fleet.wheels import Here, check_here, order_of
    from toolkit.profile.loading import profile_from_data

    profile = profile_from_data(current.profile)
    words = lacking(profile, service.layout)
    plan: dict[str, Any] = {"steps": [] if words is None else [{"action": "libraries", "reasons": [words]}]}
    wheels = None if wheelhouse is None else Here(order_of(profile, wheelhouse))
    if wheels is not None:
        plan = wheels.planned(plan)
    check_here(plan, profile)
    for step in plan["steps"]:
        say(f"{service.name}: {step['action']}: {'; '.join(step['reasons'])}")
    if wheels is not None:
        wheels.bring(watcher.step, watcher.line)


def prune(
    dry: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    inventory: Inventories = None,
    limit: Limit = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove environments, wheels and copies of the toolkit that no release of any service needs."""
    where = fleet.where(inventory, limit)
    if not dry:
        require_yes(yes=yes, as_json=as_json)
        # Asked with what would go in sight; what becomes unused meanwhile goes with it.
        if not yes and _unused(where, dry=True, as_json=as_json):
            _ask("remove what is listed above", yes=yes, as_json=as_json)
        elif not yes:
            return
    _unused(where, dry=dry, as_json=as_json)


def _unused(where: fleet.Where | None, *, dry: bool, as_json: bool) -> bool:
    """Show what no release needs, removed unless `dry`; whether there is something."""
    from toolkit.fleet.results import to_json

    if where is not None:
        results = fleet.look(None, "prune", {"dry": dry}, where)
        if as_json:
            emit(to_json(results))
        for result in results:
            if isinstance(result.value, dict):
                _show_unused(f"{result.host}: ", result.value, dry=dry, as_json=as_json)
        fleet.finish_looking(results)
        return any(result.value and result.value["unused"] for result in results)
    from toolkit.hostside.operations import prune as run

    found = run({"dry": dry})
    if as_json:
        emit({"ok": True, **found})
    _show_unused("", found, dry=dry, as_json=as_json)
    return bool(found["unused"])


def uninstall(
    name: ServiceName = None,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge", help="Also its history and, with the last service, the toolkit; checkpoints stay."
        ),
    ] = False,
    inventory: Inventories = None,
    limit: Limit = None,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Stop a service and remove it: unit, releases, state and cache."""
    where = fleet.where(inventory, limit)
    if where is not None:
        if name is None:
            name = fleet.service_of(None, where, fleet.begin_listing(where))
        _ask(f"{_removal(name, purge=purge)} from every host that --limit matches", yes=yes, as_json=as_json)
        fleet.uninstall(name, where, fleet.Manner(True, verbose, as_json, lock_wait), purge=purge)
        return
    from toolkit.cli.progress import Lines
    from toolkit.life.uninstall import uninstall as run
    from toolkit.release.locate import find_removable

    service = find_removable(name)
    _ask(f"{_removal(service.name, purge=purge)} from this machine", yes=yes, as_json=as_json)
    watcher = Lines(verbose=verbose).watcher()
    try:
        removal = run(service, purge=purge, wait=lock_wait, watcher=watcher)
    except StoppedWatchingError:
        raise StoppedWatchingError(
            f"interrupted; {service.name} may be stopped and removed in part",
            hint="the same command again goes on with it",
        ) from None
    if as_json:
        emit({"ok": True, **removal.to_json()})
        return
    for line in removal.removed:
        answer(f"removed {line}")
    for line in removal.kept:
        answer(f"kept {line}")
    say(f"uninstall: committed: {removal.message}")
    if removal.hint is not None:
        say(f"  next: {removal.hint}")


def _removal(name: str, *, purge: bool) -> str:
    """What a person is asked before it."""
    more = ", its history and, with the last service, the toolkit" if purge else ""
    return f"stop {name} and remove its unit, releases, state, log and cache{more}"


def _show_unused(front: str, found: dict[str, Any], *, dry: bool, as_json: bool) -> None:
    tell = say if as_json else answer
    word = "would remove" if dry else "removed"
    for item in found["unused"]:
        tell(f"{front}{word} {item['what']} {item['path']} ({item['size'] >> 20} MiB)")
    if not found["unused"]:
        tell(f"{front}nothing to remove")


def _ask(what: str, *, yes: bool, as_json: bool) -> None:
    """Ask before something is removed.

    Raises:
        ConfigError: there is nobody to ask.
        Exit: the answer is no.
    """
    require_yes(yes=yes, as_json=as_json)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"this would {what}", hint="add --yes")
    confirm(f"{what}?")
