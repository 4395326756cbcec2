"""deploy profile, plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from toolkit.cli import fleet
from toolkit.cli.options import (
    Batch,
    IgnoredChecks,
    Inventories,
    Json,
    Limit,
    LockWait,
    NewBaseline,
    Overlays,
    Parallel,
    ProfileName,
    Seed,
    Sets,
    Verbose,
    Wheelhouse,
    Yes,
)
from toolkit.cli.output import answer, emit, say, tell_doubts
from toolkit.cli.plans import confirm_loss, confirm_undone, show_ansible, show_plan
from toolkit.errors import EXIT_DIFFERENT, ConfigError

if TYPE_CHECKING:
    from toolkit.deploy.prepare import Prepared
    from toolkit.fleet.wheels import Here
    from toolkit.profile.loading import ResolvedProfile
    from toolkit.profile.schema import Profile
    from toolkit.release.request import Outcome

HERE = "this machine"


class _Deploy(typer.core.TyperGroup):
    """Tells who left out the word `profile` so."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            given = " ".join(args[:1])
            raise ConfigError(f"deploy {given}: what to deploy?", hint=f"ddtoolkit deploy profile {given}")
        return super().resolve_command(ctx, args)


deploy_app = typer.Typer(cls=_Deploy, help="Deploy a profile.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(deploy_app, name="deploy")
    app.command("plan")(plan)


@deploy_app.callback()
def _group() -> None: ...


@deploy_app.command("profile")
def deploy_profile(
    name: ProfileName,
    overlays: Overlays = None,
    sets: Sets = None,
    inventory: Inventories = None,
    limit: Limit = None,
    batch: Batch = 1,
    parallel: Parallel = 8,
    yes: Yes = False,
    lock_wait: LockWait = 0.0,
    new_baseline: NewBaseline = False,
    seed: Seed = None,
    wheelhouse: Wheelhouse = None,
    ignored: IgnoredChecks = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Deploy a profile, here or on hosts: provision, build, restart once, judge, keep or undo."""
    where = fleet.where(inventory, limit, batch=batch, parallel=parallel)
    if ignored:
        from toolkit.doctor.catalogue import require_known

        require_known(ignored)
    if where is not None:
        manner = fleet.Manner(yes, verbose, as_json, lock_wait)
        wanted = overlays or (), sets or ()
        options: dict[str, Any] = {"seed": seed, "wheelhouse": wheelhouse, "ignored": ignored or ()}
        fleet.deploy(name, *wanted, where, manner, new_baseline=new_baseline, **options)
        return
    from toolkit.cli.progress import Lines
    from toolkit.deploy.flow import deploy
    from toolkit.deploy.judging import Judging
    from toolkit.deploy.prepare import prepare
    from toolkit.release.locate import Deployed, layout_of

    if seed is not None:
        raise ConfigError("--seed needs an inventory", hint="add -i inventory.yaml")
    resolved = _load(name, overlays, sets)
    watcher = Lines(verbose=verbose).watcher()
    profile = resolved.profile
    wheels = _wheels_here(profile, wheelhouse)
    service = Deployed(profile.name, layout_of(profile))
    with watcher.reserve(service, f"deploy profile {name}", wait=lock_wait, deploys=True):
        prepared = prepare(resolved)
        told = prepared.plan.to_json()
        told = told if wheels is None else wheels.planned(told)
        show_plan(told, HERE, say)
        if prepared.plan.empty:
            _finish(prepared, None, as_json=as_json)
            return
        if as_json and not yes:
            raise ConfigError(
                "--json changes nothing without --yes", hint="add --yes, or use ddtoolkit plan --json"
            )
        confirm_undone({HERE: prepared.plan.undone}, {HERE: prepared.plan.lost}, yes=yes)
        losing = prepared.plan.loses and not new_baseline
        confirm_loss([HERE] if losing else [], profile.name, yes=yes, change="deploy")
        _check_wheelhouse(profile, told)
        from toolkit.doctor.ask import report_here
        from toolkit.doctor.preflight import mended_by, preflight
        from toolkit.doctor.request import examination
        from toolkit.profile.secrets import require_secrets

        if prepared.plan.has("release"):
            require_secrets(profile)
        passed_over = (*(ignored or ()), *mended_by(item.action for item in prepared.plan.steps))
        preflight(report_here(examination(profile, weights=False, ignored=passed_over)), watcher.step)
        if wheels is not None:
            wheels.bring(watcher.step, watcher.line)
        judging = Judging(new_baseline=new_baseline)
        outcome = deploy(prepared, watcher, lock_wait=lock_wait, judging=judging, ignored=ignored or ())
    _finish(prepared, outcome, as_json=as_json)


def plan(
    name: ProfileName,
    overlays: Overlays = None,
    sets: Sets = None,
    inventory: Inventories = None,
    limit: Limit = None,
    parallel: Parallel = 8,
    wheelhouse: Wheelhouse = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also run Ansible in check mode, and show what it would change.")
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help=f"Exit with {EXIT_DIFFERENT} when there is something to do.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a deploy would do and why; changes nothing."""
    where = fleet.where(inventory, limit, parallel=parallel)
    if where is not None:
        options: dict[str, Any] = {"wheelhouse": wheelhouse, "check": check, "as_json": as_json}
        if fleet.plan(name, overlays or (), sets or (), where, **options) and exit_code:
            raise typer.Exit(EXIT_DIFFERENT)
        return
    from toolkit.deploy.prepare import prepare

    prepared = prepare(resolved := _load(name, overlays, sets))
    told = prepared.plan.to_json()
    if (wheels := _wheels_here(resolved.profile, wheelhouse)) is not None:
        told = wheels.planned(told)
    _check_wheelhouse(resolved.profile, told)
    told |= {"overrides": [item.to_json() for item in resolved.overrides]}
    show_plan(told, HERE, say if as_json else answer)
    if check:
        from toolkit.provision.playbook import run_local

        tasks = run_local("provision.yml", prepared.needed.settings(), check=True)
        told["ansible"] = [task.to_json() for task in tasks if task.outcome == "changed"]
        show_ansible(told["ansible"], HERE, say if as_json else answer)
    if as_json:
        emit(told)
    if exit_code and (prepared.plan.by_hand or not prepared.plan.empty):
        raise typer.Exit(EXIT_DIFFERENT)


def _wheels_here(profile: Profile, wheelhouse: Path | None) -> Here | None:
    if wheelhouse is None:
        return None
    from toolkit.fleet.wheels import Here, order_of

    return Here(order_of(profile, wheelhouse))


def _check_wheelhouse(profile: Profile, plan: dict[str, Any]) -> None:
    if profile.host.wheelhouse is not None:
        from toolkit.fleet.wheels import check_here

        check_here(plan, profile)


def _load(name: str, overlays: Overlays, sets: Sets) -> ResolvedProfile:
    from toolkit.profile.loading import load_profile

    resolved = load_profile(name, overlays=overlays or (), sets=sets or ())
    tell_doubts(resolved)
    return resolved


def _finish(prepared: Prepared, outcome: Outcome | None, *, as_json: bool) -> None:
    from toolkit.cli.progress import finish, show_report
    from toolkit.deploy.summary import next_lines, summary

    if as_json:
        emit(summary(prepared.host, prepared.plan, outcome))
    if outcome is not None:
        show_report(outcome)
        finish(outcome)
    for line in next_lines(prepared.host, changed=outcome is not None):
        say(line)
