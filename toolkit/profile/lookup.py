"""Where profiles and overlays are found: a path, or a name looked up in a few folders."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import ConfigError
from toolkit.resources import bundled

VARIABLE = "DDTOOLKIT_PROFILES"
_SUFFIXES = (".yaml", ".yml")
_OVERLAYS = "overlays"


def profile_folders() -> list[Path]:
    """The folders that a name is looked up in, the first match wins.

    `profiles` in the working directory, the folder that `DDTOOLKIT_PROFILES` names, and the toolkit's own.

    Raises:
        ConfigError: `DDTOOLKIT_PROFILES` names no folder.
    """
    folders = [Path("profiles")] if Path("profiles").is_dir() else []
    named = os.environ.get(VARIABLE)
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"{VARIABLE}: {named!r} is no folder", hint="correct or unset it")
        folders.append(folder)
    return [*folders, bundled("profiles")]


def profile_files() -> Iterator[tuple[str, Path]]:
    """Name and file of every profile that a name finds, in order of name.

    Raises:
        ConfigError: a folder cannot be read.
    """
    found: dict[str, Path] = {}
    for folder in profile_folders():
        try:
            entries = sorted(folder.iterdir())
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from None
        for path in entries:
            if path.suffix in _SUFFIXES and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    yield from sorted(found.items())


def is_path(name_or_path: str) -> bool:
    """Whether this is a path (it holds a `/` or ends in `.yaml` or `.yml`) and no name."""
    return os.sep in name_or_path or name_or_path.endswith(_SUFFIXES)


def find_profile(name_or_path: str) -> Path:
    """The file of a profile; a path is returned as it is, whether or not it exists.

    Raises:
        ConfigError: there is no profile of that name; names the nearest.
    """
    if is_path(name_or_path):
        return Path(name_or_path)
    known = dict(profile_files())
    if name_or_path in known:
        return known[name_or_path]
    near = difflib.get_close_matches(name_or_path, known, n=1)
    places = ", ".join(str(folder) for folder in profile_folders())
    hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(known) or 'none'}"
    raise ConfigError(f"no profile {name_or_path!r} in {places}", hint=hint)


def overlay_files() -> dict[str, Path]:
    """Name to file of every overlay that a name finds: those in `overlays` of `profile_folders()`."""
    found: dict[str, Path] = {}
    for folder in profile_folders():
        for path in sorted((folder / _OVERLAYS).glob("*")):
            if path.suffix in _SUFFIXES and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    return found


def find_overlay(name_or_path: Path | str) -> Path:
    """The file of an overlay; a path is returned as it is, whether or not it exists.

    Raises:
        ConfigError: there is no overlay of that name; names the nearest.
    """
    name = str(name_or_path)
    if is_path(name) or Path(name).exists():
        return Path(name)
    known = overlay_files()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(sorted(known)) or 'none'}"
    raise ConfigError(f"no overlay {name!r}, and no file of that name", hint=hint)
