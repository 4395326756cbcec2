"""Where the libraries of a lock lie on this host, and where they come from."""

from __future__ import annotations

from pathlib import Path

from toolkit.build.libraries.install import Place
from toolkit.build.lock import Lock
from toolkit.build.wheel_store import Store
from toolkit.layout import Layout


def place_in(layout: Layout, lock: Lock, wheelhouse: Path | None) -> Place:
    """The place of a lock's libraries.

    Wheels that were brought for this lock come before `wheelhouse`, a folder of the host's, and both come
    before the package index.
    """
    if Store(layout).brought(lock):
        wheelhouse = layout.wheels
    return Place(layout.environments, layout.caches / "wheels", wheelhouse)
