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
    """Folders, packages, free space and, under systemd, a system user.

    Attributes:
        directories: path and mode of each folder, parents first.
        packages: Debian packages.
        min_free_bytes: free space below the first folder.
        user: system user of the service; None where it runs as whoever deploys it.
        home: that user's home folder.
        owned: the one folder that belongs to that user; root owns all others.
    """

    directories: tuple[tuple[Path, int], ...]
    packages: tuple[str, ...]
    min_free_bytes: int
    user: str | None = None
    home: Path | None = None
    owned: Path | None = None

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
    )


def _for_libraries(profile: Profile) -> tuple[str, ...]:
    """Debian's Python makes virtual environments only with this package."""
    return ("python3-venv",) if profile.installs_libraries else ()


def free_bytes(path: Path) -> int:
    """Bytes free to this user on the file system that holds `path` or its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
