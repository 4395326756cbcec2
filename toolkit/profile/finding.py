"""Where profiles are found: a path, or a name looked up in a few folders."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

import toolkit
from toolkit.errors import ConfigError

VARIABLE = "DDTOOLKIT_PROFILES"
_SUFFIXES = (".yaml", ".yml")


def profile_folders() -> list[Path]:
    """The folders that names are looked up in, first match wins; those that do not exist are left out."""
    package = Path(toolkit.__file__).resolve().parent
    candidates = [Path("profiles"), package.parent / "profiles", package / "_data" / "profiles"]
    if os.environ.get(VARIABLE):
        candidates.insert(1, Path(os.environ[VARIABLE]).expanduser())
    return [folder for folder in candidates if folder.is_dir()]


def profile_files() -> Iterator[tuple[str, Path]]:
    """Name and file of every profile that a name finds, in order of name."""
    found: dict[str, Path] = {}
    for folder in profile_folders():
        for path in sorted(folder.iterdir()):
            if path.suffix in _SUFFIXES:
                found.setdefault(path.stem, path)
    yield from sorted(found.items())


def find_profile(name_or_path: str) -> Path:
    """The file of a profile.

    Args:
        name_or_path: a path if it holds a `/` or ends in `.yaml` or `.yml`, else a name.

    Raises:
        ConfigError: no profile of that name, with the nearest name. A path is returned as it is.
    """
    if os.sep in name_or_path or name_or_path.endswith(_SUFFIXES):
        return Path(name_or_path)
    known = dict(profile_files())
    if name_or_path in known:
        return known[name_or_path]
    near = difflib.get_close_matches(name_or_path, known, n=1)
    looked = ", ".join(map(str, profile_folders())) or "no folder"
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}" if known else None
    raise ConfigError(f"no profile {name_or_path!r} in {looked}", hint=hint)
