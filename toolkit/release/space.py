"""Space and files on the disk that a change needs once the old release is stopped, looked for before that.

A disk that is full then costs a restart of the old release, which with a large model is many minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.layout import ServicePaths
from toolkit.service import unit_files
from toolkit.service.unit import Unit

_KIB = 1 << 10
# For what other programs write meanwhile; the journal's own space is reserved by now.
_SPARE_BYTES = 1024 * _KIB
_SPARE_FILES = 32


@dataclass(frozen=True, slots=True)
class _Need:
    """What is written in a folder, at most, and in how many files."""

    what: str
    folder: Path
    size: int
    files: int


def require_space(paths: ServicePaths, release: Path, unit: Unit) -> None:
    """Make sure that a change could write all that it writes once the old release is stopped.

    Args:
        paths: the service's files.
        release: folder of the release that is started and judged.
        unit: its unit.

    Raises:
        ToolkitError: a file system has too few free bytes or files; names the folder and both numbers.
    """
    for needs in _by_file_system(_needs(paths, release, unit)):
        status = os.statvfs(_existing(needs[0].folder))
        # What is kept for root is free to root alone (statvfs(3)).
        root = os.geteuid() == 0
        free = (status.f_bfree if root else status.f_bavail) * status.f_frsize
        wanted = sum(need.size for need in needs) + _SPARE_BYTES
        if free < wanted:
            raise _too_little(needs, f"{_words(free)} free", _words(wanted))
        files = status.f_ffree if root else status.f_favail
        wanted = sum(need.files for need in needs) + _SPARE_FILES
        if status.f_files and files < wanted:  # 0: the file system has no fixed number of inodes
            raise _too_little(needs, f"room for {files} more files (inodes)", str(wanted))


def _needs(paths: ServicePaths, release: Path, unit: Unit) -> Iterator[_Need]:
    # A report is written beside the one before and renamed; with launches to compare there is one of each.
    yield _Need("the acceptance report", release, 512 * _KIB, 4)
    yield _Need("journal, history and secrets", paths.state, 512 * _KIB, 16)
    if unit.manager == "systemd":
        yield _Need("the unit", unit_files.FOLDER, 64 * _KIB, 4)
    else:
        yield _Need("the server's log", Path(unit.log).parent, 512 * _KIB, 4)


def _by_file_system(needs: Iterator[_Need]) -> list[list[_Need]]:
    groups: dict[int, list[_Need]] = {}
    for need in needs:
        groups.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    return list(groups.values())


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _too_little(needs: list[_Need], seen: str, wanted: str) -> ToolkitError:
    where = ", ".join(f"{need.what} ({need.folder})" for need in needs)
    return ToolkitError(
        f"the disk under {needs[0].folder} has {seen}, and {wanted} are needed for {where}",
        hint="free some there (ddtoolkit prune removes what no release needs), then the same command again",
    )


def _words(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
