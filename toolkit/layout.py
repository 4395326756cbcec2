"""Where everything lies on a host.

Without a root the system's places are used (`/opt/ddtoolkit`, `/var/lib/ddtoolkit`, ...; FHS 3.0); with
one, for use without root rights, everything lies below it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TOOL = "/opt/ddtoolkit/tool"  # copies of the toolkit on a host, by the hash of what they hold
PYTHON = "/usr/bin/python3"  # of the host's distribution, on a host that names no other


@dataclass(frozen=True, slots=True)
class ServicePaths:
    """The files of one service.

    Attributes:
        base: the service's own folder under `services`.
        releases: one folder a release, immutable once committed.
        current: symbolic link to the release that is to serve.
        state: journal, lock, history, process records; owned by the administrator, not the service.
        log: the server's output (process manager).
        cache: the only folder that the service's user owns; root code follows no link in it.
    """

    base: Path
    releases: Path
    current: Path
    state: Path
    log: Path
    cache: Path

    @property
    def lock(self) -> Path:
        """Lock token and flock target."""
        return self.state / "lock"

    @property
    def history(self) -> Path:
        """One JSON line a change."""
        return self.state / "history.jsonl"

    @property
    def transaction(self) -> Path:
        """Folder of the running or last transaction: request and journal."""
        return self.state / "transaction"

    @property
    def supervisor(self) -> Path:
        """Folder of the process manager's records."""
        return self.state / "supervisor"

    @property
    def started(self) -> Path:
        """Record of the last start under systemd."""
        return self.state / "started"


@dataclass(frozen=True, slots=True)
class Layout:
    """Root folders on a host.

    Attributes:
        root: None for the system's places, else the folder that everything lies below.
    """

    root: Path | None = None

    def _under(self, system: str, local: str) -> Path:
        return Path(system) if self.root is None else self.root / local

    @property
    def services(self) -> Path:
        """Releases of all services."""
        return self._under("/opt/ddtoolkit/services", "services")

    @property
    def environments(self) -> Path:
        """Engine environments, named by content hash."""
        return self._under("/opt/ddtoolkit/envs", "envs")

    @property
    def models(self) -> Path:
        """Model checkpoints, `name@revision`."""
        return self._under("/var/lib/ddtoolkit/models", "models")

    @property
    def wheels(self) -> Path:
        """Wheels that were brought from the control machine, of all services."""
        return self._under("/var/lib/ddtoolkit/wheels", "wheels")

    @property
    def state(self) -> Path:
        """State of all services."""
        return self._under("/var/lib/ddtoolkit/state", "state")

    @property
    def provisioned(self) -> Path:
        """What provisioning added to the system beside its own folders, for who takes it back."""
        return self._under("/var/lib/ddtoolkit/provisioned.json", "provisioned.json")

    @property
    def logs(self) -> Path:
        """Logs of all services."""
        return self._under("/var/log/ddtoolkit", "log")

    @property
    def caches(self) -> Path:
        """Caches of all services."""
        return self._under("/var/cache/ddtoolkit", "cache")

    @property
    def builds(self) -> Path:
        """What builds of all services keep: hashes and tuned values. No service can have this name."""
        return self.caches / ".build"

    def service(self, name: str) -> ServicePaths:
        """The files of the service called `name`."""
        base = self.services / name
        return ServicePaths(
            base=base,
            releases=base / "releases",
            current=base / "current",
            state=self.state / name,
            log=self.logs / f"{name}.log",
            cache=self.caches / name,
        )


def records() -> Path:
    """Where this user's services are on record, wherever they lie (XDG Base Directory Specification)."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "ddtoolkit" / "services"
