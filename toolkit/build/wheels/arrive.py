"""What a host answers about its store of wheels: requests and bytes come through one stream.

Each request is a JSON line with `verb` and `root`; the bytes of a `put` follow it. Every answer but that of
`put` is one object with the verb as its key.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from toolkit.build.libraries.install import damage
from toolkit.build.lock import Lock, needs_cuda
from toolkit.build.wheel_store import Store, Wheel, sha256_of
from toolkit.errors import ToolkitError
from toolkit.files import fsync_dir, replace_file
from toolkit.layout import Layout
from toolkit.weights.reserve import full
from toolkit.weights.store import alone

_CHUNK = 1 << 18

Request = Mapping[str, Any]
Tell = Callable[[dict[str, Any]], None]
Read = Callable[[int], bytes]  # at most so many bytes, at least one; b"" at the end


@dataclass(slots=True)
class _Coming:
    """A wheel on its way, hashed as it comes where all of it comes at once."""

    wheel: Wheel
    position: int
    digest: Any = field(default_factory=hashlib.sha256)
    hashed: int = 0

    def take(self, data: bytes) -> None:
        """Count more bytes."""
        if self.hashed == self.position:
            self.digest.update(data)
            self.hashed += len(data)
        self.position += len(data)

    def sha256(self, path: Path) -> str:
        """SHA-256 of all of it, read from `path` where a part came before."""
        return str(self.digest.hexdigest()) if self.hashed == self.position else sha256_of(path)


class Session:
    """One connection's requests.

    Args:
        read: reads the stream that the requests come from.
        tell: writes one object.
    """

    def __init__(self, read: Read, tell: Tell) -> None:
        self._read = read
        self._tell = tell
        self._held = ExitStack()
        self._alone: Path | None = None
        self._whole: set[Wheel] = set()  # seen by this very process
        self._coming: _Coming | None = None

    def close(self) -> None:
        """Let the next one work on the store."""
        self._held.close()

    def answer(self, request: Request) -> None:
        """Do what one request asks for.

        Raises:
            ToolkitError: it cannot be done; what has come stays.
        """
        verb = _VERBS.get(str(request.get("verb")))
        if verb is None:
            raise ToolkitError(f"no request {request.get('verb')!r} about wheels")
        root = request.get("root")
        layout = Layout(None if root is None else Path(root).expanduser().absolute())
        try:
            verb(self, request, layout)
        except OSError as error:
            raise full(error, layout.wheels) from None

    def look(self, request: Request, layout: Layout) -> None:
        """What wheels this host takes, and whether the libraries of a lock are installed already."""
        lock = str(request["lock"])
        folder = layout.environments / str(request["environment"])
        installed = damage(folder, lock) is None
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        self._tell({"look": {"installed": installed, "python": python, "machine": platform.machine()}})

    def list(self, request: Request, layout: Layout) -> None:
        """The wheels of a folder here, where a lock will be installed from it; None where there is none."""
        lock, folder = str(request["lock"]), Path(str(request["folder"])).expanduser()
        environment = str(request["environment"])
        brought = (layout.wheels / f"{environment}.txt").is_file()  # the store comes before the folder
        needed = not brought and damage(layout.environments / environment, lock) is not None
        names = sorted(path.name for path in folder.glob("*.whl")) if folder.is_dir() else None
        cuda = [name for name in names or () if name.startswith("torch-") and _loads_cuda(folder / name)]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        about = {"python": python, "machine": platform.machine()}
        self._tell({"list": {"needed": needed, "names": names, "cuda": cuda, **about}})

    def plan(self, request: Request, layout: Layout) -> None:
        """What has to come of `wheels`, and what does not fit; changes nothing."""
        self._tell({"plan": self._planned(request, Store(layout))})

    def begin(self, request: Request, layout: Layout) -> None:
        """The same, with the store to itself from here on and space reserved for what has to come."""
        store = Store(layout)
        self._have_alone(store)
        answer = self._planned(request, store)
        if answer["short"]:
            raise ToolkitError(answer["short"], hint="free some space, or keep less free: host.min_free_disk")
        names = {name for name, _ in answer["lacking"]}
        store.reserve(wheel for wheel in _wheels(request) if wheel.name in names)
        self._tell({"begin": answer})

    def put(self, request: Request, layout: Layout) -> None:
        """Write the next bytes of one wheel; the last of them are followed by its check."""
        store, wheel = Store(layout), Wheel(*request["wheel"])
        self._have_alone(store)
        position, count = int(request["from"]), int(request["count"])
        coming = self._coming
        if coming is None or coming.wheel != wheel or coming.position != position:
            coming = self._coming = _Coming(wheel, _come(store, wheel, position))
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(store.folder / wheel.part, flags, 0o644)
        try:
            if os.fstat(fd).st_size != position:  # else the reserved space would go with it
                os.ftruncate(fd, position)
            while count:
                data = self._read(min(count, _CHUNK))
                if not data:
                    raise ToolkitError("the connection ended within a wheel; what has come stays")
                _write(fd, data, coming.position)
                coming.take(data)
                count -= len(data)
            if coming.position == wheel.size:
                os.fchmod(fd, 0o644)
                os.fsync(fd)
        finally:
            os.close(fd)
        if coming.position == wheel.size:
            self._coming = None
            self._settle(store, coming)

    def end(self, request: Request, layout: Layout) -> None:
        """Tell what has to come again, being damaged; without any, note that the lock is whole."""
        store, lock = Store(layout), Lock(str(request["engine"]), str(request["lock"]))
        self._have_alone(store)
        wheels = _wheels(request)
        again = [wheel.name for wheel in wheels if wheel not in self._whole and not store.whole(wheel)]
        changed = not again and not store.noted(lock)
        if changed:
            store.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            fsync_dir(store.folder)
            replace_file(store.folder / f"{lock.folder_name}.txt", lock.text.encode(), 0o644)
        self._tell({"end": {"again": again, "changed": changed}})

    def _planned(self, request: Request, store: Store) -> dict[str, Any]:
        wheels = _wheels(request)
        store.require_own()
        lacking = store.lacking(wheels)
        self._whole = set(wheels) - set(lacking)
        short = store.short(lacking, int(request["unpacked"]), int(request["min_free"]))
        return {"lacking": [[wheel.name, store.arrived(wheel)] for wheel in lacking], "short": short}

    def _have_alone(self, store: Store) -> None:
        if self._alone != store.folder:
            store.require_own()
            self._held.enter_context(alone(store.folder, "wheels", lambda text: self._tell({"line": text})))
            self._alone = store.folder

    def _settle(self, store: Store, coming: _Coming) -> None:
        part = store.folder / coming.wheel.part
        if coming.sha256(part) == coming.wheel.sha256:
            part.rename(store.folder / coming.wheel.name)
            self._whole.add(coming.wheel)
        else:
            part.unlink()
            self._tell({"line": f"{coming.wheel.name} came with another sha256 than it is to have"})


def _wheels(request: Request) -> list[Wheel]:
    return [Wheel(*item) for item in request["wheels"]]


def _come(store: Store, wheel: Wheel, position: int) -> int:
    """`position`, where so many bytes of a wheel have come before; 0 begins anew."""
    there = store.arrived(wheel)
    if position not in (0, there):
        said = f"{store.folder / wheel.part}: {there} bytes have come, not {position}"
        raise ToolkitError(f"{said}: another transfer changed it", hint="run the same command again")
    return position


def _write(fd: int, data: bytes, position: int) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, position)
        left, position = left[count:], position + count


def _loads_cuda(torch: Path) -> bool:
    try:
        return needs_cuda(torch)
    except (OSError, BadZipFile, StopIteration):  # pip will say so
        return False


_VERBS = {
    "look": Session.look,
    "list": Session.list,
    "plan": Session.plan,
    "begin": Session.begin,
    "put": Session.put,
    "end": Session.end,
}
