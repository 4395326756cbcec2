"""A host's own store of wheels, which all services share: root's, checked on arrival, kept for the next one.

`NAME.whl` is complete and was what its checksum says when it came; `.NAME.whl.part` is on its way;
`lib-HASH.txt` is a lock whose wheels are all there. Needs nothing but the standard library: it runs where
nothing is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.build.lock import Lock, engines, lock_of
from toolkit.errors import ToolkitError
from toolkit.files import flocked
from toolkit.layout import Layout
from toolkit.weights.listing import File
from toolkit.weights.reserve import free_below, shortage, take, to_come

KEPT_FREE = "kept free (host.min_free_disk)"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+!-]*\.whl")
_LOCK = re.compile(r"lib-[0-9a-f]{16}\.txt")
_CHUNK = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel as it is to be.

    Attributes:
        name: of the file.
        sha256: hexadecimal.
        size: bytes.
    """

    name: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ToolkitError(f"{self.name!r} is no name of a wheel")

    def to_json(self) -> list[Any]:
        """As JSON."""
        return [self.name, self.sha256, self.size]

    @property
    def part(self) -> str:
        """Name of the file while it is on its way."""
        return f".{self.name}.part"


def sha256_of(path: Path, *, follow: bool = False) -> str:
    """SHA-256 of a file, hexadecimal.

    Raises:
        OSError: it cannot be read, or is a link and `follow` is false.
    """
    total = hashlib.sha256()
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        while piece := file.read(_CHUNK):
            total.update(piece)
    return total.hexdigest()


class Store:
    """The store of a layout.

    Attributes:
        folder: where it lies; made when the first wheel comes.
    """

    def __init__(self, layout: Layout) -> None:
        self.folder = layout.wheels
        self._environments = layout.environments

    def noted(self, lock: Lock) -> bool:
        """Whether the wheels of a lock were all brought here."""
        return (self.folder / f"{lock.folder_name}.txt").is_file()

    def brought(self, lock: Lock) -> bool:
        """The same, for whoever installs them: pip reads a file again after it has compared its hash.

        Raises:
            ToolkitError: another user could change them meanwhile.
        """
        if not self.noted(lock):
            return False
        self.require_own()
        for path in sorted(self.folder.glob("*.whl")):
            _require_own(path, path.lstat())
        return True

    def require_own(self) -> None:
        """Make sure that the folder is a folder, if it is there, and nobody else may write it.

        Raises:
            ToolkitError: it is something else, belongs to another user, or may be written by one.
        """
        with contextlib.suppress(FileNotFoundError):
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                what = "a link" if stat.S_ISLNK(status.st_mode) else "no folder"
                hint = "move it away; wheels come into a folder there, on which another disk may be mounted"
                raise ToolkitError(f"{self.folder} is {what}, so no wheels are kept there", hint=hint)
            _require_own(self.folder, status)

    def whole(self, wheel: Wheel) -> bool:
        """Whether a wheel is here and what it is to be, and nobody else's; every byte is read."""
        path = self.folder / wheel.name
        try:
            status = path.lstat()
            _require_own(path, status)
            return status.st_size == wheel.size and sha256_of(path) == wheel.sha256
        except (OSError, ToolkitError):
            return False

    def lacking(self, wheels: Iterable[Wheel]) -> list[Wheel]:
        """Those that are not here, or are not what they are to be."""
        return [wheel for wheel in wheels if not self.whole(wheel)]

    def arrived(self, wheel: Wheel) -> int:
        """Bytes of a wheel that have come; 0 where more are there than it has."""
        try:
            size = (self.folder / wheel.part).lstat().st_size
        except OSError:
            return 0
        return size if size <= wheel.size else 0

    def short(self, wheels: Sequence[Wheel], unpacked: int, min_free: int) -> str | None:
        """The sum that does not fit on the disk, in words; None where all does.

        Args:
            wheels: that have to come.
            unpacked: bytes of what they hold, for the environment that is made of them.
            min_free: bytes that are to stay free.
        """
        coming = to_come(self.folder, map(_file, wheels))
        parts = [("wheels", coming), (KEPT_FREE, min_free)]
        installed = ("the environment that is made of them", unpacked)
        if _device(self.folder) == _device(self._environments):
            return shortage([parts[0], installed, parts[1]], free_below(self.folder), self.folder)
        return shortage(parts, free_below(self.folder), self.folder) or shortage(
            [installed, parts[1]], free_below(self._environments), self._environments
        )

    def reserve(self, wheels: Iterable[Wheel]) -> None:
        """Take the space of what has to come, where the file system can.

        Raises:
            OSError: the disk is full.
        """
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        take(self.folder, map(_file, wheels))

    def unused(self, environments: Iterable[str], young: float) -> Iterator[Path]:
        """Files that no lock needs: neither one of this toolkit, nor one whose libraries are in use.

        Args:
            environments: names of the folders of libraries that are needed.
            young: seconds; younger files are left.
        """
        if (
            self.folder.is_symlink() or not self.folder.is_dir() or flocked(self.folder / ".wheels.lock")
        ):  # wheels are being brought
            return
        kept = {lock_of(engine).folder_name for engine in engines()} | set(environments)
        locks = [path for path in sorted(self.folder.iterdir()) if _LOCK.fullmatch(path.name)]
        needed = [Lock("", path.read_text(encoding="utf-8")) for path in locks if path.stem in kept]
        names = {pin for lock in needed for pin in lock.pins()}
        for path in sorted(self.folder.iterdir()):
            # Another name is none of a wheel, and so not from here.
            unneeded = (
                _NAME.fullmatch(path.name) and path.name.count("-") > 1 and pin_of(path.name) not in names
            )
            dead = path.suffix == ".part" or (path in locks and path.stem not in kept)
            if (unneeded or dead) and _age(path) > young:
                yield path


def _require_own(path: Path, status: os.stat_result) -> None:
    owner = status.st_uid
    if owner not in (0, os.geteuid()):
        said, mend = f"belongs to user {_user(owner)}", f"chown {_user(os.geteuid())} {path}"
    elif status.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(status.st_mode):
        said, mend = (
            f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o})",
            f"chmod go-w {path}",
        )
    else:
        return
    hint = f"look at what is in it, or remove it: rm -r {path}; then {mend}, and run the same command again"
    raise ToolkitError(f"{path} {said}, who could change what is installed from there", hint=hint)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def pin_of(name: str) -> tuple[str, str]:
    """Distribution, as locks write it, and version of a wheel's file name (PEP 427)."""
    distribution, version = [*name.split("-"), ""][:2]
    return re.sub(r"[-_.]+", "-", distribution).lower(), version.partition("+")[0]


def _file(wheel: Wheel) -> File:
    return File(wheel.part, wheel.size, "")


def _device(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime
    return 0.0
