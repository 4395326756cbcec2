"""The service manager that a unit asks for."""

from __future__ import annotations

from toolkit.errors import ToolkitError
from toolkit.layout import ServicePaths
from toolkit.service.manager import ServiceManager
from toolkit.service.process import ProcessManager
from toolkit.service.systemd_manager import SystemdManager


def manager_for(kind: str, paths: ServicePaths) -> ServiceManager:
    """The manager called `kind` for the service with these paths.

    Raises:
        ToolkitError: there is no such manager.
    """
    if kind == "process":
        return ProcessManager(paths)
    if kind == "systemd":
        return SystemdManager(paths)
    raise ToolkitError(f"there is no service manager {kind!r}", hint="service.manager: process or systemd")


def recorded_manager(paths: ServicePaths) -> ServiceManager:
    """The manager that started the service last, by what is on record; the process manager without any."""
    return SystemdManager(paths) if paths.started.exists() else ProcessManager(paths)
