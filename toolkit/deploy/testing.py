"""The acceptance checks against what a service here serves; restarts nothing and takes no lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import ToolkitError
from toolkit.profile.loading import profile_from_data
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, current_release
from toolkit.service.secrets import serving_secrets

if TYPE_CHECKING:
    from toolkit.acceptance import Report, Settings

Level = Literal["quick", "full"]


def settings_of(service: Deployed, level: Level | None) -> tuple[Settings, dict[str, str]]:
    """What is tested, against the bind address, and the keys that are stored for it.

    Raises:
        ConfigError: nothing is deployed.
    """
    from toolkit.acceptance.settings import settings_for

    release = current_release(service)
    keys = {key.replace("-", "_"): value for key, value in serving_secrets(release.unit).items()}
    return settings_for(profile_from_data(release.profile), release.unit.url, level=level), keys


def run_test(service: Deployed, on_progress: Callable[[dict[str, Any]], None]) -> Report:
    """Run the checks of level `quick`.

    Args:
        service: the service.
        on_progress: called with one JSON-safe event before and after each check.

    Raises:
        ConfigError: nothing is deployed.
        ToolkitError: it does not run.
    """
    from toolkit.acceptance import run_acceptance

    settings, keys = settings_of(service, "quick")
    status = ServiceHost(service.layout, service.name).process_status()
    if not status.active:
        raise ToolkitError(
            f"{service.name}: there is nothing to test: it is {status.state}",
            hint=f"ddtoolkit status {service.name}; then: ddtoolkit start {service.name}",
        )
    return run_acceptance(settings, on_progress, keys=keys)
