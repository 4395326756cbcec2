"""What a profile needs of a host."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.layout import Layout
from toolkit.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class Requirements:
    """Folders, packages, free space and, under systemd, a system user, the time and the journal's size.

    Attributes:
        directories: path and mode of each folder, parents first.
        packages: Debian packages.
        min_free_bytes: free space below the first folder.
        user: system user of the service; None where it runs as whoever deploys it.
        home: that user's home folder.
        owned: the one folder that belongs to that user; root owns all others.
        time_sync: whether an NTP client has to run.
        journal: drop-in of journald.conf(5) that limits the journal; None where there is no say in it.
        journal_max: bytes that the journal may take; None for no limit of ours, and no drop-in.
        record: where what provisioning added to the system is noted, for who takes it back; None: nowhere.
    """

    directories: tuple[tuple[Path, int], ...]
    packages: tuple[str, ...]
    min_free_bytes: int
    user: str | None = None
    home: Path | None = None
    owned: Path | None = None
    time_sync: bool = False
    journal: Path | None = None
    journal_max: int | None = None
    record: Path | None = None

    @property
    def journal_text(self) -> str | None:
        """What the drop-in holds; None where there is to be none."""
        if self.journal_max is None:
            return None
        return f"# Written by ddtoolkit.\n[Journal]\nSystemMaxUse={self.journal_max}\n"

    def owner(self, path: Path) -> str | None:
        """Who the folder has to belong to; None where that is left as it is."""
        if self.user is None:
            return None
        return self.user if path == self.owned else "root"

    def settings(self) -> dict[str, Any]:
        """The variables of the `provision` playbook; JSON-safe."""
        return {
            "directories": [
                {"path": str(path), "mode": f"{mode:04o}", "owner": self.owner(path)}
                for path, mode in self.directories
            ],
            "packages": list(self.packages),
            "min_free_bytes": self.min_free_bytes,
            "user": self.user,
            "home": None if self.home is None else str(self.home),
            "time_sync": self.time_sync,
            "journal": None if self.journal is None else str(self.journal),
            "journal_text": self.journal_text,
            "record": None if self.record is None else str(self.record),
        }


def requirements(profile: Profile, layout: Layout) -> Requirements:
    """What `profile` needs of a host whose folders lie as `layout` says."""
    paths = layout.service(profile.name)
    root = () if layout.root is None else ((layout.root, 0o700),)
    user = profile.system_user
    return Requirements(
        directories=(
            *root,
            (layout.services, 0o755),
            (paths.base, 0o755),
            (paths.releases, 0o755),
            (layout.environments, 0o755),
            (layout.models, 0o755),
            (layout.state, 0o700),
            (paths.state, 0o700),
            (layout.logs, 0o750),
            (layout.caches, 0o755),
            (paths.cache, 0o700 if user is None else 0o750),
        ),
        packages=(*profile.host.packages, *_for_libraries(profile)),
        min_free_bytes=profile.host.min_free_disk,
        user=user,
        home=None if user is None else layout.caches,
        owned=None if user is None else paths.cache,
        time_sync=user is not None and profile.host.time_sync,
        journal=None if user is None else journal_drop_in(profile.name),
        journal_max=None if user is None else profile.host.journal_max_size,
        record=layout.provisioned if layout.root is None else None,
    )


def journal_drop_in(name: str) -> Path:
    """Drop-in of journald.conf(5) of the service called `name`."""
    return Path("/etc/systemd/journald.conf.d") / f"ddtoolkit-{name}.conf"


def _for_libraries(profile: Profile) -> tuple[str, ...]:
    """Debian's Python makes virtual environments only with this package."""
    return ("python3-venv",) if profile.installs_libraries else ()


def free_bytes(path: Path) -> int:
    """Bytes free to this user on the file system that holds `path` or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
