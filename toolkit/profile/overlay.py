"""Keeping swapped values: writing `key.path=value` into an overlay file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.assignments import values_of
from toolkit.service.files import replace_file


@dataclass(frozen=True, slots=True)
class Overlay:
    """An overlay file with values to be added, read and checked before anything is changed.

    Attributes:
        path: the file; it need not exist yet.
        content: what it will hold.
    """

    path: Path
    content: dict[str, Any]

    def write(self) -> None:
        """Write it whole or not at all.

        Raises:
            ToolkitError: the disk is full, or the folder cannot be written.
        """
        text = yaml.safe_dump(self.content, sort_keys=False, allow_unicode=True)
        try:
            mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o644
            replace_file(self.path, text.encode(), mode)
        except OSError as error:
            raise ToolkitError(
                f"{self.path}: cannot be written: {error.strerror}; the swap itself is done",
                hint="write the values into an overlay by hand",
            ) from error


def overlay_with(path: Path, sets: Sequence[str]) -> Overlay:
    """The overlay in `path`, or an empty one, with `key.path=value` applied.

    Raises:
        ConfigError: an assignment is wrong; the file is no map, cannot be read, or has comments, which
            rewriting it would lose.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}", hint="make it, or save elsewhere")
    content = _read(path)
    for keys, value in values_of(sets):
        place = content
        for key in keys[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[keys[-1]] = value
    return Overlay(path, content)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read: {said}", hint="mend it, or save elsewhere") from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: is no map of keys", hint="save elsewhere")
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or " #" in line:
            raise ConfigError(
                f"{path}:{number}: has comments, which saving would lose",
                hint="save elsewhere, or write the values there by hand",
            )
    return found or {}
