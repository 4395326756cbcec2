"""The deployed profile on this version of the toolkit and its locked libraries."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.build.for_profile import environment_of
from toolkit.deploy.flow import Watcher, release_again
from toolkit.deploy.judging import Judging
from toolkit.profile.loading import profile_from_data
from toolkit.release.controller import hold
from toolkit.release.locate import Deployed, current_release
from toolkit.release.request import Outcome
from toolkit.release.store import Release


def upgrade_changes(service: Deployed, current: Release) -> list[str]:
    """What differs between the environment of the current release and that of an upgraded one."""
    profile = profile_from_data(current.profile)
    environment = environment_of(profile, service.layout)
    built = current.manifest.get("environment") or {}
    changes = environment.differences(built.get("versions", {}), built.get("source", ""))
    if not changes and built.get("digest") != environment.digest:
        changes = [f"another interpreter: {environment.python}"]
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
    with hold(
        service.layout,
        service.name,
        "upgrade",
        wait=lock_wait,
        on_event=watcher.event,
        on_wait=watcher.waiting,
    ) as session:
        current = current_release(service)
        if not upgrade_changes(service, current):
            return None
        return release_again(session, current, "upgrade", watcher, judging, given)
