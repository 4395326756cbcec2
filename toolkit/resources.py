"""Profiles and playbooks that come with the toolkit, from a checkout or from the installed wheel."""

from __future__ import annotations

from pathlib import Path

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
