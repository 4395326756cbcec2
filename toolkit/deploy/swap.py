"""Changing keys of what is deployed, with one restart, or none where the server does not depend on them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from toolkit.deploy.bases import ground_of, require_report
from toolkit.deploy.judging import Judging
from toolkit.deploy.kept_secrets import keeps_secrets
from toolkit.deploy.record import Recorded, record, require_recordable
from toolkit.deploy.releasing import NewRelease, provision, release, unprovisioned
from toolkit.deploy.swapped import Swapped
from toolkit.deploy.watcher import Watcher
from toolkit.errors import ConfigError
from toolkit.profile.changes import Change
from toolkit.profile.loading import change_profile, differences
from toolkit.profile.recorded import restarts
from toolkit.profile.schema import Profile
from toolkit.profile.secrets import require_secrets
from toolkit.provision.lacks import missing
from toolkit.provision.requirements import requirements
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, current_release
from toolkit.release.losing import Loss, loss_of
from toolkit.release.request import Kind, Outcome
from toolkit.release.store import Release
from toolkit.release.trial import go_on, longer, overtaken


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
    command = swap_command(sets, judging)
    with watcher.hold(service, command, wait=lock_wait) as session:
        current = current_release(service)
        profile, changes = swap_changes(session.host, current, sets, judging)
        if not changes:
            seconds = judging.experiment_seconds
            if seconds is None or not prolong or longer(session.host, current, sets, seconds) is None:
                return None
            return go_on(session.host, current, command, seconds)
        if given is None and keeps_secrets(current.unit):
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
                raise unprovisioned(service.name, needed, current.given)
            provision(profile, service, watcher)
        data = profile.model_dump(mode="json", by_alias=True)
        swapped = Swapped.after(current, changes, data)
        if not restarts(changes):
            return record(session.host, command, [Recorded(current, data, swapped), *ground], changes)
        kind: Kind = "swap" if judging.experiment_seconds is None else "experiment"
        change = NewRelease(kind, command, profile, data, changes, swapped, {}, current.given)
        return release(session, change, current, watcher, judging, given)


def swap_command(sets: Sequence[str], judging: Judging) -> str:
    """The command as the history has it."""
    words = ["swap", *(word for item in sets for word in ("--set", item))]
    if judging.experiment_seconds is not None:
        words += ["--experiment", "--for", f"{judging.experiment_seconds:.10g}s"]
    if judging.new_baseline:
        words.append("--new-baseline")
    return shlex.join(words)


def swap_changes(
    host: ServiceHost, current: Release, sets: Sequence[str], judging: Judging
) -> tuple[Profile, tuple[Change, ...]]:
    """The changed profile and its diff.

    What ends an experiment for good is held against the experiment's base.

    Raises:
        ConfigError: a key or value is wrong, or the key cannot be swapped.
        ToolkitError: hands have changed the release that it starts from, and would return to.
    """
    if not sets:
        raise ConfigError("nothing to swap", hint="--set speculative.budget=7")
    current.require_unaltered(host.name)
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
    if changes and restarts(changes) and judging.experiment_seconds is None and not judging.new_baseline:
        require_report(host.name, base)
    if base.id != current.id and judging.experiment_seconds is None:
        # What restarts nothing ends no experiment; to keep a value that is tried is a change like others.
        kept = change_profile(base.profile, sets)[1]
        if restarts(changes) or restarts(kept):
            changes = differences(base.profile, profile) or changes
    return profile, tuple(changes)


def overtakes(host: ServiceHost, current: Release, changes: Sequence[Change], judging: Judging) -> str | None:
    """What a swap with this diff makes of a running experiment, in a line; None where none is touched."""
    if not restarts(changes):
        return None
    return overtaken(host, current, changes, tries=judging.experiment_seconds is not None)


def foreseen(host: ServiceHost, current: Release, changes: Sequence[Change], judging: Judging) -> Loss | None:
    """What is known to count against a swap with this diff; None where nothing is."""
    if judging.experiment_seconds is not None or judging.new_baseline or not restarts(changes):
        return None
    return loss_of(host, current, changes)


def notices(host: ServiceHost, current: Release, changes: Sequence[Change], judging: Judging) -> list[str]:
    """What is to be told of a swap with this diff before it begins."""
    loss = foreseen(host, current, changes, judging)
    found = (overtakes(host, current, changes, judging), None if loss is None else loss.line)
    return [line for line in found if line]


def loses(host: ServiceHost, current: Release, changes: Sequence[Change], judging: Judging) -> bool:
    """Whether a swap with this diff would be undone, by what is known already."""
    loss = foreseen(host, current, changes, judging)
    return loss is not None and loss.certain


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
    data = profile.model_dump(mode="json", by_alias=True)
    return [Recorded(ground, data, Swapped.after(ground, changes, data))]
