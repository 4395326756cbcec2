"""Everything that belongs to one service on this host."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import read_json
from toolkit.layout import Layout, ServicePaths
from toolkit.release.lock import Lock
from toolkit.release.reserve import Reserve
from toolkit.release.store import Store
from toolkit.service.manager import ProcessStatus, ServiceManager
from toolkit.service.registry import manager_for, recorded_manager
from toolkit.service.unit import Unit

HOST_FILE = "host.json"


@dataclass(frozen=True, slots=True)
class ServiceHost:
    """One service on this host.

    Attributes:
        layout: where things lie.
        name: name of the service.
    """

    layout: Layout
    name: str

    @property
    def paths(self) -> ServicePaths:
        """Its files."""
        return self.layout.service(self.name)

    @property
    def store(self) -> Store:
        """Its releases."""
        return Store(self.paths)

    @property
    def lock(self) -> Lock:
        """Its lock."""
        return Lock(self.paths, self.name)

    @property
    def reserve(self) -> Reserve:
        """Its space on the disk."""
        return Reserve(self.paths)

    def secrets_file(self, release_id: str) -> Path:
        """Where the secrets of a release are put when it starts."""
        return self.paths.state / "secrets" / f"{release_id}.yaml"

    def manager(self, unit: Unit | None) -> ServiceManager:
        """The manager of `unit`; without one, what is on record tells which it is.

        Raises:
            ToolkitError: the unit asks for one that is not available.
        """
        return recorded_manager(self.paths) if unit is None else manager_for(unit.manager, self.paths)

    def process_status(self) -> ProcessStatus:
        """What the manager of the current release says; needs no unit that can be read."""
        current = self.store.current()
        manager = self.manager(None)
        with contextlib.suppress(ToolkitError):
            manager = self.manager(current.unit if current else None)
        return manager.status()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, for the detached process."""
        return {"name": self.name, "root": None if self.layout.root is None else str(self.layout.root)}


def read_host(folder: Path) -> ServiceHost:
    """The service that the transaction in `folder` is about.

    Raises:
        ToolkitError: the file is absent or damaged.
    """
    value = read_json(folder / HOST_FILE)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ToolkitError(f"{folder / HOST_FILE}: absent or damaged")
    root = value.get("root")
    return ServiceHost(Layout(Path(root) if root else None), value["name"])
