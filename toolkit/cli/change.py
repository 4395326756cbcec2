"""swap, rollback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    Sets,
    Verbose,
    Yes,
)
from toolkit.cli.output import emit, require_yes, say
from toolkit.errors import ConfigError, ToolkitError
from toolkit.spans import in_words

if TYPE_CHECKING:
    from toolkit.deploy.judging import Judging
    from toolkit.profile.overlay import Overlay
    from toolkit.release.host import ServiceHost
    from toolkit.release.locate import Deployed
    from toolkit.release.request import Outcome


_EXPERIMENT = "1h"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("swap")(swap)
    app.command("rollback")(rollback)


def swap(
    name: ServiceName = None,
    sets: Sets = None,
    experiment: Annotated[
        bool, typer.Option("--experiment", help="Judge correctness only, and return to the base by itself.")
    ] = False,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="How long an experiment lasts, from now on, such as 30m; unset: 1h.",
        ),
    ] = None,
    new_baseline: NewBaseline = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the values into an overlay once they are kept."),
    ] = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Change keys of the deployed profile with one restart; undone by itself when it is worse."""
    seconds = _experiment_seconds(duration, experiment=experiment)
    overlay, prolong = _overlay(save, sets or (), experiment=experiment), duration is not None
    where = fleet.where(inventory, limit, batch=batch)
    if where is not None:
        manner = fleet.Manner(yes, verbose, as_json, lock_wait)
        options = {
            "new_baseline": new_baseline,
            "experiment_seconds": seconds,
            "prolong": duration is not None,
        }
        fleet.swap(name, sets or (), where, manner, **options)
        _save(overlay)
        return
    from toolkit.cli.progress import Lines
    from toolkit.deploy.judging import Judging
    from toolkit.deploy.swap import swap as run_swap
    from toolkit.release.locate import find_service

    service = find_service(name)
    require_yes(yes=yes, as_json=as_json)
    watcher = Lines(verbose=verbose).watcher()
    judging = Judging(new_baseline=new_baseline, experiment_seconds=seconds)
    with watcher.reserve(service, "swap", wait=lock_wait):
        told = _tell_swap(service, sets or (), judging, prolong=prolong, yes=yes)
        if told is None:
            _save(overlay)
            if as_json:
                emit({"ok": True, "service": service.name, "changes": [], "outcome": None})
            return
        outcome = run_swap(
            service, sets or (), watcher, lock_wait=lock_wait, judging=judging, prolong=prolong
        )
    unsaved = None
    if outcome is None or outcome.exit_code == 0:
        try:
            _save(overlay)
        except ToolkitError as error:
            unsaved = error
    _finish(service, outcome, as_json=as_json, unsaved=unsaved, notices=told)
    if unsaved is not None:
        raise unsaved


def _tell_swap(
    service: Deployed, sets: Sequence[str], judging: Judging, *, prolong: bool, yes: bool
) -> list[str] | None:
    """Show the diff of a swap on this machine, with what it makes of an experiment; None: nothing to do.

    Asks where it is known before that it would be undone.
    """
    from toolkit.cli.plans import confirm_loss
    from toolkit.deploy.swap import loses, notices, swap_changes
    from toolkit.plan.steps import describe
    from toolkit.profile.recorded import restarts
    from toolkit.release.host import ServiceHost
    from toolkit.release.locate import current_release
    from toolkit.release.trial import longer

    host, current = ServiceHost(service.layout, service.name), current_release(service)
    _, changes = swap_changes(host, current, sets, judging)
    seconds = judging.experiment_seconds
    if changes:
        say(f"swap on {service.name}, {_restart(host) if restarts(changes) else 'no restart'}:")
        for line in describe(changes):
            say(f"  {line}")
        if seconds is not None:
            say(f"  an experiment: returns to the release before after {in_words(seconds)}")
        told = notices(host, current, changes, judging)
        for line in told:
            say(f"  note: {line}")
        losing = [service.name] if loses(host, current, changes, judging) else []
        confirm_loss(losing, service.name, yes=yes)
        return told
    running = None if seconds is None else longer(host, current, sets, seconds if prolong else None)
    if running is not None and running.line is not None:
        say(f"swap on {service.name}, no restart:")
        say(f"  {running.line}")
        return []
    say(f"{service.name}: nothing to do, every key has that value already")
    if running is not None:
        say(f"  {running.advice}")
    return None


def rollback(
    name: ServiceName = None,
    release: Annotated[
        str | None, typer.Option("--to", metavar="RELEASE", help="A release that history shows.")
    ] = None,
    new_baseline: Annotated[
        bool,
        typer.Option(
            "--new-baseline",
            help="Hold later changes against this judgement of the release, not against its first one.",
        ),
    ] = False,
    refused: Annotated[
        bool, typer.Option("--refused", help="With --to: go there although that release was refused.")
    ] = False,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Return to an earlier release, by default the one that served before, with its own checks."""
    where = fleet.where(inventory, limit, batch=batch)
    if where is not None:
        manner = fleet.Manner(yes, verbose, as_json, lock_wait)
        fleet.rollback(name, release, where, manner, new_baseline=new_baseline, refused=refused)
        return
    from toolkit.cli.progress import Lines
    from toolkit.deploy.rollback import rollback as run_rollback
    from toolkit.deploy.rollback import rollback_target
    from toolkit.plan.steps import describe
    from toolkit.profile.loading import differences
    from toolkit.release.host import ServiceHost
    from toolkit.release.locate import current_release, find_service

    service = find_service(name)
    require_yes(yes=yes, as_json=as_json)
    watcher = Lines(verbose=verbose).watcher()
    with watcher.reserve(service, "rollback", wait=lock_wait):
        host = ServiceHost(service.layout, service.name)
        current = current_release(service)
        target = rollback_target(host, current, release, refused=refused)
        say(f"rollback of {service.name} from {current.id} to {target.id}, {_restart(host)}:")
        for line in describe(differences(current.profile, target.profile)):
            say(f"  {line}")
        outcome = run_rollback(
            service, release, watcher, lock_wait=lock_wait, new_baseline=new_baseline, refused=refused
        )
    _finish(service, outcome, as_json=as_json)


def _experiment_seconds(text: str | None, *, experiment: bool) -> float | None:
    from toolkit.profile.units import parse_duration

    if not experiment:
        if text is not None:
            raise ConfigError(
                "--for is for an experiment: without it a swap is for good", hint="add --experiment"
            )
        return None
    text = text or _EXPERIMENT
    try:
        seconds = float(parse_duration(text))
    except ValueError as error:
        raise ConfigError(f"--for {text!r} {error}") from None
    if not 1 <= seconds <= 7 * 86400:
        raise ConfigError(f"--for {text!r}: from 1s to 7d")
    return seconds


def _overlay(save: Path | None, sets: Sequence[str], *, experiment: bool) -> Overlay | None:
    """The overlay to write afterwards, checked before anything is changed."""
    if save is None:
        return None
    if not sets:
        raise ConfigError("nothing to swap", hint="--set speculative.budget=7")
    if experiment:
        raise ConfigError("an experiment is not kept, so there is nothing to save", hint="leave out --save")
    from toolkit.profile.overlay import overlay_with

    return overlay_with(save, sets)


def _save(overlay: Overlay | None) -> None:
    if overlay is not None:
        overlay.write()
        say(f"saved to {overlay.path}: deploy with --overlay {overlay.path} to keep these values")


def _restart(host: ServiceHost) -> str:
    if host.process_status().active:
        return "one restart"
    return "which starts the service: it does not run"


def _finish(
    service: Deployed,
    outcome: Outcome | None,
    *,
    as_json: bool,
    unsaved: ToolkitError | None = None,
    notices: Sequence[str] = (),
) -> None:
    from toolkit.cli.progress import finish, show_report

    if as_json:
        emit(
            {
                "ok": unsaved is None and (outcome is None or outcome.exit_code == 0),
                "service": service.name,
                "outcome": outcome and outcome.to_json(),
                **({"notices": list(notices)} if notices else {}),
                **({} if unsaved is None else {"error": unsaved.message}),
            }
        )
    if outcome is not None:
        show_report(outcome)
        finish(outcome)
