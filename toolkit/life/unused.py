"""Environments and copies of the toolkit that no release of any service needs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import toolkit
from toolkit.build.bootstrap import REMEMBERED
from toolkit.build.wheel_store import Store
from toolkit.errors import ToolkitError
from toolkit.files import flocked
from toolkit.layout import TOOL, Layout
from toolkit.life.referred import referred
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release

# What was made this recently may be for a release that is not staged yet.
YOUNG = 900.0
_LIBRARIES = re.compile(r"lib-[0-9a-f]{16}")
_UNDER_WAY = re.compile(r"\.(lib-[0-9a-f]{16})(\.new|\.old)")
_COPY = re.compile(r"[0-9a-f]{16}")
_REMOVED = re.compile(r"\.removed-.+\.(\d+)")


@dataclass(frozen=True, slots=True)
class Unused:
    """A folder or file that nothing needs.

    Attributes:
        path: it.
        what: `libraries`, `code`, `toolkit`, `wheel`, or `rest`, of a removal that was cut off.
        size: bytes that it takes on the disk.
    """

    path: Path
    what: str
    size: int

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "path": str(self.path)}


def services_in(layout: Layout) -> list[str]:
    """Names of all services that have releases below a layout."""
    return sorted(path.parent.name for path in layout.services.glob("*/releases"))


def unused(layout: Layout, *, young: float = YOUNG) -> list[Unused]:
    """What can be removed, whichever services there are.

    Args:
        layout: where things lie.
        young: seconds; younger folders are left.

    Raises:
        ToolkitError: a release does not tell what it needs, so that nothing can be said to be unused.
    """
    needed = {path for name in services_in(layout) for path in _needed_by(ServiceHost(layout, name))}
    needed |= _of_this_process(layout) | referred(layout)
    found = []
    for path, what in _candidates(layout):
        with contextlib.suppress(FileNotFoundError):
            if path not in needed and time.time() - path.stat().st_mtime > young and not _in_work(path):
                found.append(Unused(path, what, _size(path)))
    libraries = {path.name for path in needed if _LIBRARIES.fullmatch(path.name)}
    wheels = Store(layout).unused(libraries, young)
    return [*found, *(Unused(path, "wheel", _blocks(path)) for path in wheels)]


def remove(found: Unused) -> None:
    """Remove it; renamed first, so that a part of it is never taken for the whole.

    Raises:
        ToolkitError: it cannot be removed.
    """
    trash = found.path.with_name(f".removed-{found.path.name}.{os.getpid()}")
    try:
        if found.what == "wheel":
            found.path.unlink(missing_ok=True)
            return
        found.path.rename(trash)
        shutil.rmtree(trash)
        found.path.with_name(f".{found.path.name}.lock").unlink(missing_ok=True)
    except OSError as error:
        raise ToolkitError(f"{error.filename or found.path}: cannot be removed: {error.strerror}") from None


def _needed_by(host: ServiceHost) -> Iterator[Path]:
    for release in host.store.all():
        yield from _needs(release)
    status = host.process_status()
    if status.active and status.release is not None:
        try:
            serving = host.store.get(status.release)
        except ToolkitError:
            raise ToolkitError(
                f"{host.name} serves {status.release}, whose folder is gone: what it needs is not known",
                hint=f"ddtoolkit deploy profile {host.name}, or ddtoolkit stop {host.name}; then prune again",
            ) from None
        yield from _needs(serving)


def _needs(release: Release) -> list[Path]:
    built = release.manifest.get("environment")
    if built is None:
        return []
    try:
        return [Path(built["path"]), Path(built["python"]).parents[1]]
    except (KeyError, TypeError, IndexError):
        raise ToolkitError(
            f"{release.path}: its manifest does not tell what it needs; nothing is removed",
            hint=f"remove that release by hand if it is not wanted: {release.path}",
        ) from None


def _of_this_process(layout: Layout) -> set[Path]:
    """What runs this, and what the next command will run under."""
    home = Path(toolkit.__file__).parents[1]
    found = {home, Path(sys.executable).parents[1], Path(sys.prefix)}
    if layout.root is None:
        with contextlib.suppress(OSError, IndexError):
            python = (Path(TOOL) / REMEMBERED).read_text(encoding="utf-8").strip()
            found.add(Path(python).parents[1])
    return found


def _candidates(layout: Layout) -> Iterator[tuple[Path, str]]:
    folders = [layout.environments, *([Path(TOOL)] if layout.root is None else [])]
    for path in sorted(path for folder in folders for path in folder.glob(".removed-*")):
        name = _REMOVED.fullmatch(path.name)
        if name is not None and not Path(f"/proc/{name[1]}").exists():
            yield path, "rest"
    for path in sorted(layout.environments.glob("*")):
        if _LIBRARIES.fullmatch(path.name) or _UNDER_WAY.fullmatch(path.name):
            yield path, "libraries"
        elif _COPY.fullmatch(path.name):
            yield path, "code"
    if layout.root is None:
        for path in sorted(Path(TOOL).glob("*")):
            if _COPY.fullmatch(path.name):
                yield path, "toolkit"


def _in_work(path: Path) -> bool:
    """Whether libraries are being installed there."""
    beside = _UNDER_WAY.fullmatch(path.name)
    return flocked(path.with_name(f".{beside[1] if beside else path.name}.lock"))


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        total += sum(_blocks(Path(root) / name) for name in names)
    return total


def _blocks(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0
