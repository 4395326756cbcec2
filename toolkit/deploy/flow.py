"""Deploy, swap and rollback on this machine.

Each ends in a transaction that runs detached on the host; what is here only prepares it and watches it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.build.builder import build
from toolkit.build.environment import Environment
from toolkit.build.for_profile import environment_of, install, lacking
from toolkit.deploy.judging import Judging, acceptance_of, comparison_of
from toolkit.deploy.prepare import Prepared
from toolkit.deploy.record import Recorded, record, require_recordable
from toolkit.deploy.reuse import built_already, discard_changed, fits
from toolkit.errors import ConfigError, ToolkitError
from toolkit.layout import Layout
from toolkit.plan.steps import shown
from toolkit.profile.changes import Change
from toolkit.profile.loading import change_profile, differences, profile_from_data
from toolkit.profile.recorded import restarts
from toolkit.profile.schema import Profile
from toolkit.profile.secrets import require_secrets
from toolkit.provision.lacks import missing
from toolkit.provision.playbook import run_local
from toolkit.provision.requirements import Requirements, requirements
from toolkit.release import history
from toolkit.release.control import run_request
from toolkit.release.controller import Session, hold
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.journal import Event
from toolkit.release.locate import Deployed, current_release, remember
from toolkit.release.lock import whoami
from toolkit.release.request import Kind, Outcome, Request
from toolkit.release.store import Release, content_digest
from toolkit.release.trial import go_on, longer
from toolkit.service.command import release_unit
from toolkit.service.secrets import store_secrets, stored_secrets
from toolkit.service.unit import SecretSource, Unit
from toolkit.weights import wanted as weights


@dataclass(frozen=True, slots=True)
class Watcher:
    """What a flow tells whoever watches it.

    Attributes:
        step: called at the start of a step with its name and a line about it.
        line: called with a line of progress within the step.
        event: called with each event of the transaction.
    """

    step: Callable[[str, str], None]
    line: Callable[[str], None]
    event: Callable[[Event], None]

    def waiting(self, message: str) -> None:
        """The lock is another's: whose, and how long it is waited for."""
        self.step("lock", message)


def deploy(
    prepared: Prepared,
    watcher: Watcher,
    *,
    lock_wait: float,
    judging: Judging,
    given: Mapping[str, str] | None = None,
    built: dict[str, Any] | None = None,
    ignored: Sequence[str] = (),
) -> Outcome | None:
    """Carry out a planned deploy.

    Args:
        prepared: what is to be done.
        watcher: told of every step.
        lock_wait: seconds to wait for the lock.
        judging: how the release is judged.
        given: values of the secrets, where these and provisioning are another machine's work; else None.
        built: what `build_ahead` gave; None builds here.
        ignored: checks of the doctor that were told not to count; the history has them.

    Returns:
        The transaction's outcome; None when provisioning and repairs were all there was to do.

    Raises:
        ConfigError: a secret cannot be read.
        LockedError: another change is under way.
        ToolkitError: provisioning or the build failed; nothing that serves was touched.
    """
    plan = prepared.plan
    if plan.has("provision") and given is not None:
        raise _unprovisioned(prepared.host.name, prepared.needed)
    if plan.has("release") and given is None:
        require_secrets(prepared.profile)
    if prepared.current is not None and plan.has("record") and not plan.has("release"):
        require_recordable(prepared.host, [prepared.current])
    remember(prepared.service)
    if plan.has("provision"):
        provision(prepared.profile, prepared.service, watcher)
    if not any(plan.has(action) for action in ("repair", "release", "record", "restart", "start")):
        return None
    words = (f"--ignore-check {name}" for name in ignored)
    command = " ".join([f"deploy profile {prepared.profile.name}", *words])
    with hold(
        prepared.service.layout,
        prepared.service.name,
        command,
        wait=lock_wait,
        on_event=watcher.event,
        on_wait=watcher.waiting,
    ) as session:
        _refuse_if_moved(session.host, prepared.current)
        _repair(prepared, watcher)
        if not plan.has("release"):
            recorded = None
            if prepared.current is not None and plan.has("record"):
                swapped = set(prepared.current.swapped) - {change.key for change in plan.changes}
                wanted = Recorded(prepared.current, prepared.resolved.data, swapped, prepared.sources)
                recorded = record(session.host, command, [wanted], plan.changes)
            if not (plan.has("restart") or plan.has("start")):
                return recorded
            kind: Kind = "restart" if plan.has("restart") else "start"
            request = Request(kind=kind, who=whoami(), command=command, release=prepared.current_id)
            return run_request(session, request, watcher.event)
        change = _Change(
            "deploy",
            command,
            prepared.profile,
            prepared.resolved.data,
            plan.changes,
            (),
            prepared.sources,
            built,
        )
        return _release(session, change, prepared.current, watcher, judging, given)


def _repair(prepared: Prepared, watcher: Watcher) -> None:
    """Set right what can be set right while the server runs.

    Raises:
        ToolkitError: something cannot be; names it.
    """
    for drift in prepared.drifts:
        if drift.repair is None:
            continue
        watcher.step("repair", str(drift))
        try:
            drift.repair()
        except (OSError, KeyError) as error:
            raise ToolkitError(f"{drift.subject}: cannot be set right: {error}", hint=drift.fix) from error


def build_ahead(prepared: Prepared, watcher: Watcher) -> dict[str, Any] | None:
    """Build what a planned deploy will serve, before anything is touched.

    Returns:
        The manifest, for `deploy`; None where the plan has no new release.

    Raises:
        ToolkitError: the build failed.
    """
    if not prepared.plan.has("release"):
        return None
    layout = prepared.service.layout
    return _build(prepared.profile, prepared.environment, prepared.current, layout, watcher)


def _build(
    profile: Profile, environment: Environment, base: Release | None, layout: Layout, watcher: Watcher
) -> dict[str, Any]:
    if (wanted := lacking(profile, layout)) is not None:
        watcher.step("libraries", wanted)
        install(profile, layout, watcher.line)
        environment = environment_of(profile, layout)
    weights.fetch(profile, watcher.step, watcher.line)
    watcher.step("build", "environment, checkpoint hashes, tuned values; what is there already is used")
    discard_changed(environment, layout)
    manifest = built_already(profile, environment, base)
    if manifest is not None:
        watcher.line("nothing that it depends on has changed: the build of the release before is used")
        return manifest
    return build(profile, environment, layout, on_progress=watcher.line)


def swap(
    service: Deployed,
    sets: Sequence[str],
    watcher: Watcher,
    *,
    lock_wait: float,
    judging: Judging,
    given: Mapping[str, str] | None = None,
    prolong: bool = False,
) -> Outcome | None:
    """Change keys of the profile that is deployed, by one transaction.

    Args:
        service: the service.
        sets: `key.path=value`.
        watcher: told of every step.
        lock_wait: seconds to wait for the lock.
        judging: how the release is judged.
        given: values of the secrets, where these and provisioning are another machine's work; else None.
        prolong: let an experiment that tries these very values return by the time that `judging` names.

    Returns:
        The outcome; None when every key has the asked value already.

    Raises:
        ConfigError: a key or value is wrong, a secret cannot be read, or nothing is deployed.
        LockedError: another change is under way.
    """
    command = _swap_command(sets, judging)
    with hold(
        service.layout, service.name, command, wait=lock_wait, on_event=watcher.event, on_wait=watcher.waiting
    ) as session:
        current = current_release(service)
        profile, changes = swap_changes(session.host, current, sets, judging)
        if not changes:
            seconds = judging.experiment_seconds
            if seconds is None or not prolong or longer(session.host, current, sets, seconds) is None:
                return None
            return go_on(session.host, current, command, seconds)
        if given is None and _keeps_secrets(current.unit):
            given = {}
        if given is None:
            require_secrets(profile)
        ground: Sequence[Recorded] = ()
        if not restarts(changes):
            ground = _ground_too(session.host, current, sets)
            require_recordable(session.host, [current, *(item.release for item in ground)])
        # What is on the host already needs no provisioning, but a swap may ask for more of the host.
        needed = requirements(profile, service.layout)
        if missing(needed):
            if given is not None:
                raise _unprovisioned(service.name, needed)
            provision(profile, service, watcher)
        swapped = tuple({*current.swapped, *(change.key for change in changes)})
        data = profile.model_dump(mode="json", by_alias=True)
        if not restarts(changes):
            return record(session.host, command, [Recorded(current, data, swapped), *ground], changes)
        kind: Kind = "swap" if judging.experiment_seconds is None else "experiment"
        change = _Change(kind, command, profile, data, changes, swapped, {})
        return _release(session, change, current, watcher, judging, given)


def _swap_command(sets: Sequence[str], judging: Judging) -> str:
    words = [f"--set {item}" for item in sets]
    if judging.experiment_seconds is not None:
        words.append(f"--experiment --for {judging.experiment_seconds:.10g}s")
    if judging.new_baseline:
        words.append("--new-baseline")
    return " ".join(["swap", *words])


def swap_changes(
    host: ServiceHost, current: Release, sets: Sequence[str], judging: Judging
) -> tuple[Profile, tuple[Change, ...]]:
    """The changed profile and its diff.

    What ends an experiment for good is held against the experiment's base.

    Raises:
        ConfigError: a key or value is wrong, or the key cannot be swapped.
        ToolkitError: hands have changed the profile that it would start from.
    """
    if not sets:
        raise ConfigError("nothing to swap", hint="--set speculative.budget=7")
    _require_made(host.name, current)
    profile, changes = change_profile(current.profile, sets)
    fixed = [change.key for change in changes if change.key in ("name", "schema", "host.root")]
    if fixed:
        raise ConfigError(
            f"{fixed[0]} cannot be swapped: it says which service this is",
            hint="deploy a profile of its own",
        )
    if changes and not restarts(changes) and judging.experiment_seconds is not None:
        raise ConfigError(
            f"the server does not depend on {', '.join(change.key for change in changes)}: nothing to try",
            hint="the same without --experiment puts it on record, without a restart",
        )
    base = ground_of(host, current)
    if base.id != current.id and judging.experiment_seconds is None:
        # What restarts nothing ends no experiment; to keep a value that is tried is a change like others.
        kept = change_profile(base.profile, sets)[1]
        if restarts(changes) or restarts(kept):
            changes = differences(base.profile, profile) or changes
    return profile, tuple(changes)


def _require_made(name: str, current: Release) -> None:
    """Take over no value that nobody has judged; where only the unit was changed, a new release mends it.

    Raises:
        ToolkitError: hands have changed the release's profile or manifest.
    """
    if content_digest(current.built_profile, current.manifest) != current.digest:
        current.require_unaltered(name)


def _ground_too(host: ServiceHost, current: Release, sets: Sequence[str]) -> list[Recorded]:
    """The keys, as they are put on record with the release that a running experiment returns to, too.

    Raises:
        ToolkitError: that release is damaged.
    """
    ground = ground_of(host, current)
    if ground.id == current.id:
        return []
    profile, changes = change_profile(ground.profile, sets)
    if not changes:
        return []
    swapped = {*ground.swapped, *(change.key for change in changes)}
    return [Recorded(ground, profile.model_dump(mode="json", by_alias=True), swapped)]


def ground_of(host: ServiceHost, current: Release) -> Release:
    """The release that a change is judged against: the base of a running experiment, else the current one."""
    experiment = read_experiment(host.paths)
    if experiment is None or experiment.release != current.id:
        return current
    return host.store.get(experiment.base)


def bases_of(host: ServiceHost, current: Release | None) -> tuple[Release, ...]:
    """What a change is judged against, then what served the same target before it, newest first.

    A base that decodes without speculation, or was measured beside other traffic, lacks a figure: without the
    earlier ones, a worse tree would pass after it.
    """
    if current is None:
        return ()
    ground = ground_of(host, current)
    found = [ground]
    for earlier in reversed(history.served(host.paths)):
        with contextlib.suppress(ToolkitError):  # pruned or damaged
            release = host.store.get(earlier)
            if release.id not in (ground.id, current.id) and _target(release) == _target(ground):
                found.append(release)
    return tuple(found)


def _target(release: Release) -> Any:
    return (release.profile.get("model") or {}).get("target")


def rollback(
    service: Deployed,
    release_id: str | None,
    watcher: Watcher,
    *,
    lock_wait: float,
    new_baseline: bool = False,
) -> Outcome:
    """Go back to an earlier release with its own environment and its own checks.

    Args:
        service: the service.
        release_id: None takes the newest accepted release before the current one.
        watcher: told of every step.
        lock_wait: seconds to wait for the lock.
        new_baseline: hold later changes against this judgement of the release, not against its first one.

    Raises:
        ConfigError: there is no such release.
        LockedError: another change is under way.
    """
    command = f"rollback {release_id or ''}".strip()
    with hold(
        service.layout, service.name, command, wait=lock_wait, on_event=watcher.event, on_wait=watcher.waiting
    ) as session:
        current = current_release(service)
        target = rollback_target(session.host, current, release_id)
        changes = _changes_between(current, target)
        profile = profile_from_data(target.profile)
        request = Request(
            kind="rollback",
            who=whoami(),
            command=command,
            release=target.id,
            base=current.id,
            changes=changes,
            acceptance=acceptance_of(profile, target.unit, (), Judging()),
            keep_releases=profile.service.keep_releases,
            new_baseline=new_baseline,
        )
        return run_request(session, request, watcher.event)


def rollback_target(host: ServiceHost, current: Release, release_id: str | None) -> Release:
    """The release that a rollback goes to.

    Raises:
        ConfigError: there is none, or it is the one that is current.
    """
    if release_id is not None:
        target = host.store.get(release_id)
        if target.id == current.id:
            raise ConfigError(f"{target.id} is the current release already", hint="ddtoolkit history")
        return target
    for earlier in reversed(history.served(host.paths)):
        if earlier != current.id:
            with contextlib.suppress(ConfigError):  # pruned: further back
                return host.store.get(earlier)
    raise ConfigError(
        f"{host.name}: no release that served before {current.id} is kept", hint="ddtoolkit history"
    )


def full_test(service: Deployed, watcher: Watcher, *, lock_wait: float) -> Outcome:
    """Judge the current release at level `full`: it is restarted as linear DFLASH and as a chain, and back.

    Raises:
        ConfigError: nothing is deployed, or it does not decode with DDTREE.
        LockedError: a change is under way.
    """
    command = "test --level full"
    with hold(
        service.layout, service.name, command, wait=lock_wait, on_event=watcher.event, on_wait=watcher.waiting
    ) as session:
        current = current_release(service)
        profile = profile_from_data(current.profile)
        if profile.speculative.algorithm != "DDTREE":
            algorithm = profile.speculative.algorithm
            raise ConfigError(
                f"level full holds DDTREE against DFLASH, but {service.name} runs {algorithm}",
                hint="ddtoolkit test --level quick",
            )
        judging = Judging(new_baseline=True)
        request = Request(
            kind="test",
            who=whoami(),
            command=command,
            release=current.id,
            acceptance=acceptance_of(profile, current.unit, (), judging),
            comparison=comparison_of(profile, current.path, current.manifest, service.layout),
        )
        return run_request(session, request, watcher.event)


def _unprovisioned(name: str, needed: Requirements) -> ToolkitError:
    return ToolkitError(
        f"{name}: the host lacks what this needs: {'; '.join(missing(needed))}",
        hint=f"ddtoolkit deploy profile {name} -i INVENTORY provisions it through Ansible",
    )


def provision(profile: Profile, service: Deployed, watcher: Watcher) -> None:
    """Run the provision playbook on this machine.

    Raises:
        ToolkitError: a task failed.
    """
    watcher.step("provision", "folders, packages and free space, by Ansible")
    done = run_local(
        "provision.yml",
        requirements(profile, service.layout).settings(),
        on_task=lambda task: watcher.line(f"{task.task}: {task.outcome}"),
    )
    changed = [task.task for task in done if task.outcome == "changed"]
    watcher.line(f"changed: {', '.join(changed)}" if changed else "changed nothing")


def release_again(
    session: Session,
    current: Release,
    command: str,
    watcher: Watcher,
    judging: Judging,
    given: Mapping[str, str] | None,
) -> Outcome:
    """A new release of the current one's profile, from the environment that it would have now."""
    _require_made(session.host.name, current)
    profile = profile_from_data(current.profile)
    if given is None and _keeps_secrets(current.unit):
        given = {}
    if given is None:
        require_secrets(profile)
    change = _Change("deploy", command, profile, current.profile, (), current.swapped, current.sources())
    return _release(session, change, current, watcher, judging, given)


@dataclass(frozen=True, slots=True)
class _Change:
    kind: Kind
    command: str
    profile: Profile
    data: dict[str, Any]
    changes: Sequence[Change]
    swapped: tuple[str, ...]
    sources: dict[str, bytes]
    built: dict[str, Any] | None = None


def _release(
    session: Session,
    change: _Change,
    base: Release | None,
    watcher: Watcher,
    judging: Judging,
    given: Mapping[str, str] | None,
) -> Outcome:
    host = session.host
    environment = environment_of(change.profile, host.layout)
    manifest = change.built
    if manifest is None or not fits(manifest, environment):
        manifest = _build(change.profile, environment, base, host.layout, watcher)
    release_id = host.store.new_id(content_digest(change.data, manifest))
    unit = release_unit(change.profile, manifest, host.store.path(release_id), host.layout)
    if given is not None:
        unit = _with_kept_secrets(unit, base, given)
    watcher.step("release", f"staging {release_id}")
    release = host.store.stage(
        release_id,
        profile=change.data,
        unit=unit,
        manifest=manifest,
        sources=change.sources,
        changes=change.changes,
        swapped=change.swapped,
    )
    comparison = None
    if change.profile.acceptance.level == "full" and judging.experiment_seconds is None:
        comparison = comparison_of(change.profile, release.path, manifest, host.layout)
    request = Request(
        kind=change.kind,
        who=whoami(),
        command=change.command,
        release=release.id,
        base=None if base is None else base.id,
        changes=tuple(change.changes),
        acceptance=acceptance_of(change.profile, unit, bases_of(host, base), judging),
        comparison=comparison,
        experiment_seconds=judging.experiment_seconds,
        keep_releases=change.profile.service.keep_releases,
    )
    return run_request(session, request, watcher.event)


def _keeps_secrets(unit: Unit) -> bool:
    """Whether the values lie on this host alone, since another machine had read them."""
    return any(source == SecretSource() for source in unit.secrets.values())


def _with_kept_secrets(unit: Unit, base: Release | None, given: Mapping[str, str]) -> Unit:
    """Store the secrets of a release whose values come from elsewhere, or from the release before.

    Each release has its own, so that one that is undone leaves the values of the other as they were.

    Raises:
        ConfigError: a value is missing.
    """
    of_base = None
    with contextlib.suppress(ToolkitError):  # a damaged base is replaced, whatever its secrets were
        of_base = None if base is None else base.unit
    before = {} if of_base is None else stored_secrets(of_base)
    if of_base is not None and not before and of_base.secrets and set(of_base.secrets) <= set(given):
        # The base's own are gone: without them there would be no way back to it.
        store_secrets(of_base, {key: given[key] for key in of_base.secrets})
    values = {key: given.get(key) or before.get(key) for key in unit.secrets}
    if missing_keys := [key for key, value in values.items() if value is None]:
        raise ConfigError(
            f"{unit.name}: no value for {', '.join(missing_keys)} is on the host",
            hint=f"bring it there with: ddtoolkit deploy profile {unit.name} -i INVENTORY",
        )
    kept = replace(unit, secrets={key: SecretSource() for key in unit.secrets})
    store_secrets(kept, {key: value for key, value in values.items() if value is not None})
    return kept


def _refuse_if_moved(host: ServiceHost, planned: Release | None) -> None:
    now = host.store.current()
    if (now.id if now else None) != (planned.id if planned else None):
        current = now.id if now else "no release"
        raise ToolkitError(
            f"{host.name} was changed while this deploy was planned: {current} is current",
            hint="run the same command again to see the new plan",
        )


def _changes_between(current: Release, target: Release) -> tuple[Change, ...]:
    return tuple(differences(current.profile, target.profile))


def describe(changes: Sequence[Change]) -> list[str]:
    """A diff for people, a line a key."""
    return [f"{change.key}: {shown(change.old)} -> {shown(change.new)}" for change in changes]
