"""What killed processes left half-made, which nothing will ever finish.

Files are written under a hidden name and renamed, so what a SIGKILL, a power cut or a full disk leaves behind
is never read; but it takes up space, and the secrets of a release that never came about lie on. The holder of
the service's lock removes it once no transaction is under way.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.build.environment import abandoned
from toolkit.files import temporaries
from toolkit.release import claims
from toolkit.release.host import ServiceHost
from toolkit.release.store import PENDING_FILE, STAGING
from toolkit.service import unit_files
from toolkit.service.systemd import RECOVER_UNIT, unit_name


def clear(host: ServiceHost) -> None:
    """Remove what earlier commands on the service left half-made; the caller holds its lock.

    Nothing that is in use is touched: no transaction runs, and builds for other services hold locks of their
    own. What cannot be removed is left for the next time.
    """
    for path in list(_leavings(host)):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _leavings(host: ServiceHost) -> Iterator[Path]:
    paths = host.paths
    yield from paths.releases.glob(f"{STAGING}*")
    yield from paths.releases.glob(f"*/.{PENDING_FILE}.*")
    yield from (paths.transaction.with_name(f"transaction.{end}") for end in ("new", "old"))
    yield from paths.base.glob(".current-*")
    yield from temporaries(paths.state)
    yield from _secrets(host)
    for unit in (unit_name(host.name), RECOVER_UNIT):
        yield from temporaries(unit_files.FOLDER, unit)
    yield from abandoned(host.layout.environments)
    yield from claims.abandoned(host.name)


def _secrets(host: ServiceHost) -> Iterator[Path]:
    """Secrets files that belong to no release."""
    folder = host.secrets_file("any").parent
    yield from temporaries(folder)
    for path in folder.glob("*.yaml"):
        if not path.name.startswith(".") and not (host.paths.releases / path.stem).is_dir():
            yield path
