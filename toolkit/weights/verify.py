"""Hashing a checkpoint again: what was touched but is the same gets a new mark, what is corrupt is noted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.weights.pace import Meter, Tell
from toolkit.weights.store import Mark, Marker, damage, mark_of, read_marker, status_of, write_marker

_READ = 1 << 22


def verify(folder: Path, tell: Tell) -> list[str]:
    """Hash every file of a checkpoint; what is wrong, a line each.

    A file whose content is corrupt is noted in the marker, so that the next deploy fetches it again.

    Args:
        folder: the checkpoint.
        tell: called with lines of progress.

    Raises:
        ToolkitError: it has no marker, so that nothing is known of its content.
        OSError: a file cannot be read, or the marker not be written.
    """
    return _hash(folder, tell, lambda mark, status: status.st_size == mark.size)


def settle(folder: Path, tell: Tell) -> list[str]:
    """Hash what has the right size but another time or inode: a copy or a touch is no damage.

    Returns:
        What is wrong then, as `damage` tells it.
    """
    if read_marker(folder) is None:
        return damage(folder)
    return _hash(folder, tell, lambda mark, status: not mark.fits(status) and status.st_size == mark.size)


def _hash(folder: Path, tell: Tell, wanted: Callable[[Mark, os.stat_result], bool]) -> list[str]:
    marker = read_marker(folder)
    if marker is None:
        raise ToolkitError(f"{folder} has no marker: nothing is known of its content", hint="fetch it again")
    chosen = {
        path: mark
        for path, mark in marker.files.items()
        if (status := status_of(folder / path)) and wanted(mark, status) and not (folder / path).is_symlink()
    }
    files = dict(marker.files)
    with Meter(sum(mark.size for mark in chosen.values()), tell, word="checked of") as meter:
        for path, mark in sorted(chosen.items()):
            found = _sha256(folder / path, meter)
            same = found == mark.sha256
            files[path] = mark_of(folder / path, found) if same else replace(mark, corrupt=True)
    if files != dict(marker.files):
        write_marker(folder, Marker(marker.source, files, marker.revision, marker.arrived))
    return damage(folder)


def _sha256(path: Path, meter: Meter) -> str:
    total = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while data := file.read(_READ):
            total.update(data)
            meter.add(len(data))
    return total.hexdigest()
