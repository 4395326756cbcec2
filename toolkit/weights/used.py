"""Checkpoints on this host, and which releases need them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import read_json
from toolkit.layout import Layout
from toolkit.profile.source import is_remote, parse
from toolkit.weights.store import PART, alone, damage, read_marker, status_of

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9._-]*")


def folder_of(source: str, revision: str | None) -> str | None:
    """The folder's name that a profile's checkpoint has; None where it is not fetched, or wrong."""
    try:
        return parse(source, revision).folder if is_remote(source) else None
    except ValueError:
        return None


def users(layout: Layout) -> dict[str, list[tuple[str, bool]]]:
    """Which releases need each checkpoint: `SERVICE RELEASE`, and whether that is the current one."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for path in sorted(layout.services.glob("*/releases/*/profile.json")):
        release = path.parent
        service = release.parents[1]
        try:
            current = (service / "current").readlink().name == release.name
        except OSError:
            current = False
        for folder in _needs(read_json(path), layout):
            found.setdefault(folder, []).append((f"{service.name} {release.name}", current))
    return found


def _needs(profile: Any, layout: Layout) -> Iterator[str]:
    model = profile.get("model") if isinstance(profile, dict) else None
    for role in ("target", "drafter"):
        checkpoint = (model or {}).get(role) or {}
        source = str(checkpoint.get("source", ""))
        if (folder := folder_of(source, checkpoint.get("revision"))) is not None:
            yield folder
        elif Path(source).parent == layout.models:  # named by its path
            yield Path(source).name


def models(layout: Layout) -> list[dict[str, Any]]:
    """All checkpoints, those that are on their way included.

    Returns:
        For each: `model` (`name@revision`), `source`, `bytes` (of a part: those that have come), `complete`,
        `damage` (lines) and `used_by` (`SERVICE RELEASE`).
    """
    needed, found = users(layout), []
    for folder in sorted(layout.models.glob("*@*")):
        name = folder.name.removesuffix(PART)
        if not _FOLDER.fullmatch(name) or folder.is_symlink() or not folder.is_dir():
            continue
        part = folder.name != name
        marker = None if part else read_marker(folder)
        found.append(
            {
                "model": name,
                "source": None if marker is None else marker.source,
                "bytes": _size(folder) if marker is None else marker.size,
                "complete": not part,
                "damage": ["it is not complete yet"] if part else damage(folder),
                "used_by": [user for user, _ in needed.get(name, ())],
            }
        )
    return found


def chosen(layout: Layout, name: str) -> Path:
    """The folder of a checkpoint.

    Raises:
        ConfigError: there is none of that name.
    """
    folder = layout.models / name
    known = [item["model"] for item in models(layout)]
    if not _FOLDER.fullmatch(name) or name not in known:
        raise ConfigError(
            f"no model {name!r} below {layout.models} (there: {', '.join(dict.fromkeys(known)) or 'none'})",
            hint="ddtoolkit models list",
        )
    return folder


def remove(layout: Layout, name: str, *, force: bool, say: Callable[[str], None]) -> int:
    """Remove a checkpoint and what has come of it; the bytes that were freed.

    Args:
        layout: where things lie.
        name: `name@revision`.
        force: also where earlier releases need it, which cannot be rolled back to then.
        say: told of what is waited for.

    Raises:
        ConfigError: there is none, or the current release of a service needs it.
        ToolkitError: somebody fetches it just now, or it cannot be removed.
    """
    folder = chosen(layout, name)
    needed = users(layout).get(name, [])
    current = [user for user, is_current in needed if is_current]
    if current or (needed and not force):
        how = "the current release" if current else "an earlier release"
        hint = "deploy another checkpoint there first, or uninstall the service"
        if not current:
            hint = "--force removes it all the same: those releases cannot be rolled back to then"
        named = ", ".join(current or [user for user, _ in needed])
        raise ConfigError(f"{name} is needed by {how}: {named}", hint=hint)
    with alone(layout.models, name, say, wait=False):
        freed = 0
        for path in (folder, folder.with_name(folder.name + PART)):
            if status_of(path) is None:
                continue
            freed += _size(path)
            trash = path.with_name(f".removed-{path.name}")
            try:
                shutil.rmtree(trash, ignore_errors=True)
                path.rename(trash)  # a part of it is never taken for the whole
                shutil.rmtree(trash)
            except OSError as error:
                raise ToolkitError(f"{error.filename or path}: cannot be removed: {error.strerror}") from None
        (layout.models / f".{name}.lock").unlink(missing_ok=True)
    return freed


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
