"""Profiles, playbooks and data that come with the toolkit, from a checkout or from the installed wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

_PACKAGE = Path(__file__).resolve().parent


def bundled(kind: str) -> Path:
    """Folder of the bundled `profiles` or `playbooks`.

    A checkout's own folder beside the package comes first, then the copy inside the wheel.

    Raises:
        ToolkitError: neither exists; the installation is damaged.
    """
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        return checkout / kind
    if (_PACKAGE / "_data" / kind).is_dir():
        return _PACKAGE / "_data" / kind
    raise ToolkitError(f"the bundled {kind} are missing beside {_PACKAGE}", hint="reinstall ddtoolkit")


def bundled_data(name: str) -> dict[str, Any]:
    """A TOML file of this package, by its path in it.

    Raises:
        ToolkitError: it is missing or damaged; so is the installation.
    """
    path = _PACKAGE / name
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ToolkitError(f"{path}: {error}", hint="reinstall ddtoolkit") from None
