"""The service manager that a unit asks for."""

from __future__ import annotations

from toolkit.errors import ToolkitError
from toolkit.layout import ServicePaths
from toolkit.service.manager import ServiceManager
from toolkit.service.process import ProcessManager


def manager_for(kind: str, paths: ServicePaths) -> ServiceManager:
    """The manager called `kind` for the service with these paths.

    Raises:
        ToolkitError: this release of the toolkit runs no such manager on this host.
    """
    if kind == "process":
        return ProcessManager(paths)
    raise ToolkitError(
        f"service manager {kind!r} cannot be driven on this host", hint="set service.manager: process"
    )
