"""Removing what is the toolkit's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import ToolkitError


def remove_path(path: Path, told: Callable[[str], None]) -> None:
    """Remove a file, or a folder without following links in it; nothing where it is not there.

    Args:
        path: what to remove.
        told: called with the path once it is gone.

    Raises:
        ToolkitError: it cannot be removed.
    """
    if not os.path.lexists(path):
        return
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise ToolkitError(
            f"{error.filename or path}: cannot be removed: {error.strerror}",
            hint="the same command again goes on",
        ) from None
    told(str(path))
