"""All drifts of one service on this host. Reads only; takes no lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.drift import files, process, server, units
from toolkit.errors import ToolkitError
from toolkit.plan.finding import Drift
from toolkit.profile.changes import shown
from toolkit.profile.given import Given
from toolkit.profile.loading import differences, profile_from_data
from toolkit.profile.schema import Profile
from toolkit.provision.lacks import lacks
from toolkit.provision.requirements import requirements
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, current_release
from toolkit.release.store import Release
from toolkit.release.trial import Trial, trial_of
from toolkit.release.under_way import unsettled


def find(service: Deployed, wanted: Mapping[str, Any] | None, given: Given | None = None) -> list[Drift]:
    """Compare a service with its release, and its release with a profile.

    Args:
        service: the service.
        wanted: the profile's JSON form; None compares with the release alone.
        given: what that was resolved from, for the next steps; None: as the release was deployed.

    Raises:
        ConfigError: nothing is deployed.
    """
    current = current_release(service)
    host = ServiceHost(service.layout, service.name)
    again = current.given.deploy(service.name)
    if (change := unsettled(host)) is not None:
        # Whatever else differs now is that change's business.
        fix = f"ddtoolkit status {service.name}"
        return [Drift("process", service.name, change, fix, "no change under way", change)]
    try:
        profile, unit = profile_from_data(current.profile), current.unit
    except ToolkitError as error:
        fix, seen = error.hint or again, error.message
        return [Drift("files", str(current.path), seen, fix, "a whole release", seen, "planned")]
    found = list(_config(service.name, current, wanted, trial_of(host, current), given or current.given))
    found += _host(profile, service, again)
    found += files.drifts(host, current, profile, again)
    masked = unit.manager == "systemd" and units.masked(host)
    if unit.manager == "systemd":
        found += units.drifts(host, masked=masked)
    status = host.process_status()
    found += process.drifts(host, current, unit, status)
    if masked:
        # Whoever masked the unit does not want it started: nothing here may restart it, and so unmask it.
        found = [replace(item, mend="hand") if item.mend == "restart" else item for item in found]
    if status.state == "running":
        found += server.drifts(unit, profile, status.since)
    if current.altered() is not None:
        # A start and a restart are refused there; a new release is started, too.
        refused = [f"ddtoolkit {verb} {service.name}" for verb in ("start", "restart")]
        found = [replace(item, fix=again) if item.fix in refused else item for item in found]
    return found


def _config(
    name: str, current: Release, wanted: Mapping[str, Any] | None, trial: Trial | None, given: Given
) -> Iterator[Drift]:
    if wanted is None:
        return
    for change in differences(current.profile, wanted):
        swapped = ", swapped since the last deploy" if change.key in current.swapped else ""
        seen, expected = shown(change.old), shown(change.new)
        if trial is not None and change.key in trial.keys:
            said = f"{seen} is tried by an experiment, which {trial.ends}; the profile has {expected}"
            fix = f"it ends by itself; ddtoolkit rollback {name} ends it now"
            yield Drift("config", change.key, said, fix, expected, seen, "planned")
            continue
        said = f"{seen} is deployed{swapped}; the profile has {expected}"
        # A deploy asks before it sets back what was swapped.
        again = given.deploy(name)
        fix = f"{again} --yes sets it back; in the profile or an overlay it stays" if swapped else again
        yield Drift("config", change.key, said, fix, expected, seen, "planned")


def _host(profile: Profile, service: Deployed, again: str) -> Iterator[Drift]:
    needed = requirements(profile, service.layout)
    for lack in lacks(needed):
        yield Drift("host", lack.subject, lack.found, again, lack.expected, lack.seen, "planned")
    least, free = needed.min_free_bytes, files.free(service.layout)
    if free < least:
        said = f"{free >> 20} MiB are free, {least >> 20} MiB are to be"
        expected, seen = f"{least >> 20} MiB free", f"{free >> 20} MiB free"
        yield Drift("host", str(service.layout.services), said, "free some space there", expected, seen)
