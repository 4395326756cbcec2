"""All drifts of one service on this host. Reads only; takes no lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.deploy.locate import Deployed, current_release
from toolkit.drift import files, process, server, units
from toolkit.drift.finding import Drift
from toolkit.errors import ToolkitError
from toolkit.plan.steps import shown
from toolkit.profile.loading import differences, profile_from_data
from toolkit.profile.schema import Profile
from toolkit.provision.requirements import missing, requirements
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release
from toolkit.release.view import unsettled


def find(service: Deployed, wanted: Mapping[str, Any] | None) -> list[Drift]:
    """Compare a service with its release, and its release with a profile.

    Args:
        service: the service.
        wanted: the profile's JSON form; None compares with the release alone.

    Raises:
        ConfigError: nothing is deployed.
    """
    current = current_release(service)
    host = ServiceHost(service.layout, service.name)
    again = f"ddtoolkit deploy profile {service.name}"
    if (change := unsettled(host)) is not None:
        # Whatever else differs now is that change's business.
        return [Drift("process", service.name, change, f"ddtoolkit status {service.name}")]
    try:
        profile, unit = profile_from_data(current.profile), current.unit
    except ToolkitError as error:
        return [Drift("files", str(current.path), error.message, error.hint or again)]
    found = list(_config(current, wanted, again))
    found += _host(profile, service, again)
    found += files.drifts(host, current, profile, again)
    if unit.manager == "systemd":
        found += units.drifts(host)
    status = host.process_status()
    found += process.drifts(host, current, unit, status)
    if status.state == "running":
        found += server.drifts(unit, profile)
    return found


def _config(current: Release, wanted: Mapping[str, Any] | None, again: str) -> Iterator[Drift]:
    if wanted is None:
        return
    for change in differences(current.profile, wanted):
        swapped = ", swapped since the last deploy" if change.key in current.swapped else ""
        said = f"{shown(change.old)} is deployed{swapped}; the profile has {shown(change.new)}"
        yield Drift("config", change.key, said, again)


def _host(profile: Profile, service: Deployed, again: str) -> Iterator[Drift]:
    needed = requirements(profile, service.layout)
    for line in missing(needed):
        yield Drift("host", service.name, line, again)
    for line in files.unheld(profile.host.packages):
        yield Drift("host", service.name, line, again)
    least, free = needed.min_free_bytes, files.free(service.layout)
    if free < least:
        said = f"{free >> 20} MiB are free, {least >> 20} MiB are to be"
        yield Drift("host", str(service.layout.services), said, "free some space there")
