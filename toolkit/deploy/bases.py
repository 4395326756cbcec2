"""What a change is judged against."""

from __future__ import annotations

import contextlib
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.release import history
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.store import ACCEPTANCE_FILE, Release


def ground_of(host: ServiceHost, current: Release) -> Release:
    """The release that a change is judged against: the base of a running experiment, else the current one."""
    experiment = read_experiment(host.paths)
    if experiment is None or experiment.release != current.id:
        return current
    return host.store.get(experiment.base)


def require_report(service: str, ground: Release) -> None:
    """Make sure that what a swap is held against is what was measured, and not what hands have written.

    Args:
        service: its name.
        ground: the release that the swap is judged against.

    Raises:
        ToolkitError: its report was changed, damaged or removed since.
    """
    why = ground.report_damage()
    if ground.acceptance is None and why is None:
        why = f"{ground.path / ACCEPTANCE_FILE}: is missing"
    if why is not None:
        again = ground.given.deploy(service)
        raise ToolkitError(
            why,
            hint=f"{again} makes a release that is held against those before; the same with --new-baseline "
            "is judged by the profile's thresholds alone",
        )


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
