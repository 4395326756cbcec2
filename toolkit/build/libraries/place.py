"""Where the libraries of a lock lie on this host and come from, and installing them in a unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolkit.build.libraries.install import MODULE, Place
from toolkit.build.lock import Lock
from toolkit.build.wheel_store import Store
from toolkit.layout import Layout
from toolkit.service.detached import Tell, watch


def install_in_unit(lock: Lock, arguments: Sequence[str], state: Path, tell: Tell) -> int:
    """Install them in a unit that outlives whoever asked (`service.detached.watch`, which tells the rest)."""
    words = [*arguments, "--in-unit"]
    name = lock.folder_name
    return watch(name, words, state, tell, module=MODULE, what=f"installing {name}")


def place_in(layout: Layout, lock: Lock, wheelhouse: Path | None) -> Place:
    """The place of a lock's libraries.

    Wheels that were brought for this lock come before `wheelhouse`, a folder of the host's, and both come
    before the package index. Downloads lie where no service's cache can: a service may be called `wheels`.
    """
    if Store(layout).brought(lock):
        wheelhouse = layout.wheels
    return Place(layout.environments, layout.caches / ".wheels", wheelhouse)
