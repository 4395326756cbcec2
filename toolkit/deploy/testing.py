"""The acceptance checks against what a service here serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from toolkit.deploy.judging import Judging, acceptance_of, comparison_of
from toolkit.deploy.watcher import Watcher
from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.loading import profile_from_data
from toolkit.release.control import run_request
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, current_release
from toolkit.release.lock import whoami
from toolkit.release.request import Outcome, Request
from toolkit.service import ports
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


def require_own_server(service: Deployed) -> None:
    """Make sure that nobody else's server is taken for the service's, as far as that can be known.

    Raises:
        ConfigError: nothing is deployed.
        ToolkitError: another process listens on its port; names it.
    """
    unit = current_release(service).unit
    status = ServiceHost(service.layout, service.name).process_status()
    other = ports.foreign_listener(unit.port, status.pid)
    if not other:
        return
    whose = f" (pid {status.pid})" if status.pid else f": {service.name} is {status.state}"
    again = "restart" if status.active else "start"
    held = f"port {unit.port} on {unit.host} is held by process {other}"
    raise ToolkitError(
        f"{service.name}: {held}, which is not its server{whose}",
        hint=f"stop what holds it; then: ddtoolkit {again} {service.name}",
    )


def run_test(service: Deployed, on_progress: Callable[[dict[str, Any]], None]) -> Report:
    """Run the checks of level `quick`; restarts nothing and takes no lock.

    Args:
        service: the service.
        on_progress: called with one JSON-safe event before and after each check.

    Raises:
        ConfigError: nothing is deployed.
        ToolkitError: it does not run, or another process answers on its port.
    """
    from toolkit.acceptance import run_acceptance

    require_own_server(service)
    status = ServiceHost(service.layout, service.name).process_status()
    if not status.active:
        raise ToolkitError(
            f"{service.name}: there is nothing to test: it is {status.state}",
            hint=f"ddtoolkit status {service.name}; then: ddtoolkit start {service.name}",
        )
    settings, keys = settings_of(service, "quick")
    return run_acceptance(settings, on_progress, keys=keys)


def full_test(service: Deployed, watcher: Watcher, *, lock_wait: float) -> Outcome:
    """Judge the current release at level `full`: it is restarted as linear DFLASH and as a chain, and back.

    Raises:
        ConfigError: nothing is deployed, or it does not decode with DDTREE.
        LockedError: a change is under way.
    """
    command = "test --level full"
    with watcher.hold(service, command, wait=lock_wait) as session:
        current = current_release(service)
        profile = profile_from_data(current.profile)
        if profile.speculative.algorithm != "DDTREE":
            algorithm = profile.speculative.algorithm
            raise ConfigError(
                f"level full holds DDTREE against DFLASH, but {service.name} runs {algorithm}",
                hint=f"ddtoolkit test {service.name} --level quick",
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
