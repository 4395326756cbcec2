"""Going back to an earlier release, by one transaction."""

from __future__ import annotations

import contextlib

from toolkit.deploy.judging import Judging, acceptance_of
from toolkit.deploy.watcher import Watcher
from toolkit.errors import ConfigError
from toolkit.profile.loading import differences, profile_from_data
from toolkit.release import history
from toolkit.release.control import run_request
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, current_release
from toolkit.release.lock import whoami
from toolkit.release.refusal import refusal
from toolkit.release.request import Outcome, Request
from toolkit.release.store import Release


def rollback(
    service: Deployed,
    release_id: str | None,
    watcher: Watcher,
    *,
    lock_wait: float,
    new_baseline: bool = False,
    refused: bool = False,
) -> Outcome:
    """Go back to an earlier release with its own environment and its own checks.

    Args:
        service: the service.
        release_id: None takes the newest accepted release before the current one.
        watcher: told of every step.
        lock_wait: seconds to wait for the lock.
        new_baseline: hold later changes against this judgement of the release, not against its first one.
        refused: go to a release that was refused, too.

    Raises:
        ConfigError: there is no such release, or it was refused.
        LockedError: another change is under way.
    """
    words = ["rollback", *([release_id] if release_id else []), *(["--refused"] if refused else [])]
    command = " ".join(words)
    with watcher.hold(service, command, wait=lock_wait) as session:
        current = current_release(service)
        target = rollback_target(session.host, current, release_id, refused=refused)
        changes = tuple(differences(current.profile, target.profile))
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


def rollback_target(
    host: ServiceHost, current: Release, release_id: str | None, *, refused: bool = False
) -> Release:
    """The release that a rollback goes to.

    Args:
        host: the service.
        current: its current release.
        release_id: None takes the newest accepted release before the current one.
        refused: allow a named one that was refused.

    Raises:
        ConfigError: there is none, it is the one that is current, or it was refused.
    """
    if refused and release_id is None:
        raise ConfigError("--refused is for a release that --to names", hint="add --to RELEASE")
    if release_id is not None:
        target = _named(host, release_id)
        if target.id == current.id:
            raise ConfigError(
                f"{target.id} is the current release already", hint=f"ddtoolkit history {host.name}"
            )
        if not refused and (why := refusal(host, target)) is not None:
            # It would be judged by its own thresholds alone, which may let pass what was worse than another.
            raise ConfigError(
                f"{target.id} was refused: {why}",
                hint=f"ddtoolkit rollback {host.name} --to {target.id} --refused goes there all the same, "
                "judged by its own thresholds alone",
            )
        return target
    for earlier in reversed(history.served(host.paths)):
        if earlier != current.id:
            with contextlib.suppress(ConfigError):  # pruned: further back
                return host.store.get(earlier)
    raise ConfigError(
        f"{host.name}: no release that served before {current.id} is kept",
        hint=_after(host, current) or f"ddtoolkit history {host.name}",
    )


def _named(host: ServiceHost, release_id: str) -> Release:
    """The release that was asked for.

    Raises:
        ConfigError: there is none, or it is kept no longer.
    """
    try:
        return host.store.get(release_id)
    except ConfigError:
        if all(entry.release != release_id for entry in history.read(host.paths)):
            raise
        kept = ", ".join(item.id for item in host.store.all())
        raise ConfigError(
            f"{release_id} is in the history, but kept no longer (service.keep_releases)",
            hint=f"these are there: {kept}; a deploy of its profile makes it anew",
        ) from None


def _after(host: ServiceHost, current: Release) -> str:
    """The next step to a release that served after the current one, which was rolled back to; "" without."""
    for entry in reversed(history.read(host.paths)):
        if entry.outcome != "committed" or entry.kind not in ("deploy", "swap"):
            continue
        if entry.release is not None and entry.release != current.id:
            with contextlib.suppress(ConfigError):  # pruned: further back
                later = host.store.get(entry.release)
                return f"ddtoolkit rollback {host.name} --to {later.id} goes to one that served after it"
    return ""


def way_back(host: ServiceHost, current: Release) -> bool:
    """Whether a rollback has a release to go to."""
    try:
        rollback_target(host, current, None)
    except ConfigError:
        return False
    return True
