"""The deployed profile on this version of the toolkit and its locked libraries."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.build.for_profile import environment_of
from toolkit.deploy.judging import Judging
from toolkit.deploy.kept_secrets import keeps_secrets
from toolkit.deploy.releasing import NewRelease, release, require_made
from toolkit.deploy.swapped import Swapped
from toolkit.deploy.watcher import Watcher
from toolkit.profile.loading import profile_from_data
from toolkit.profile.secrets import require_secrets
from toolkit.release.controller import Session
from toolkit.release.locate import Deployed, current_release
from toolkit.release.request import Outcome
from toolkit.release.store import Release


def upgrade_changes(service: Deployed, current: Release) -> list[str]:
    """What differs between the environment of the current release and that of an upgraded one."""
    profile = profile_from_data(current.profile)
    environment = environment_of(profile, service.layout)
    changes = environment.differences(current.manifest.get("environment") or {})
    if (why := current.environment_damage()) is not None:
        changes.append(why)
    return changes


def upgrade(
    service: Deployed,
    watcher: Watcher,
    *,
    lock_wait: float,
    judging: Judging,
    given: Mapping[str, str] | None = None,
) -> Outcome | None:
    """Serve the deployed profile, swapped keys included, from a new environment, by one transaction.

    Args:
        service: the service.
        watcher: told of every step.
        lock_wait: seconds to wait for the lock.
        judging: how the release is judged.
        given: values of the secrets, where another machine reads them; else None.

    Returns:
        The outcome; None where the environment is the same already.

    Raises:
        ConfigError: nothing is deployed, or this version does not accept its profile.
        LockedError: another change is under way.
        ToolkitError: the libraries cannot be installed; what serves was not touched.
    """
    with watcher.hold(service, "upgrade", wait=lock_wait) as session:
        current = current_release(service)
        if not upgrade_changes(service, current):
            return None
        return _release_again(session, current, "upgrade", watcher, judging, given)


def _release_again(
    session: Session,
    current: Release,
    command: str,
    watcher: Watcher,
    judging: Judging,
    given: Mapping[str, str] | None,
) -> Outcome:
    """A new release of the current one's profile, from the environment that it would have now."""
    require_made(session.host.name, current)
    profile = profile_from_data(current.profile)
    if given is None and keeps_secrets(current.unit):
        given = {}
    if given is None:
        require_secrets(profile)
    kept = Swapped.of(current), current.sources(), current.given
    change = NewRelease("deploy", command, profile, current.profile, (), *kept)
    return release(session, change, current, watcher, judging, given)
