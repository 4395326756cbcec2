"""Bringing a checkpoint to this host: reserved, fetched, checked, marked, put in place, in this order."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import fsync_dir
from toolkit.profile.source import Source
from toolkit.weights.arrive import Arrival, Means, Patience, StoppedError
from toolkit.weights.leftovers import ARRIVED, LISTED, note_arrived, prepare
from toolkit.weights.listing import File, Listing
from toolkit.weights.origins import PIN, Origin
from toolkit.weights.pace import Bucket, Meter, Tell, size_words
from toolkit.weights.reserve import free_below, full, shortage, take, to_come
from toolkit.weights.shape import shape_problem
from toolkit.weights.store import (
    OLD,
    PART,
    Mark,
    Marker,
    alone,
    damage,
    mark_of,
    read_marker,
    shortened,
    status_of,
    write_marker,
)
from toolkit.weights.verify import settle
from toolkit.weights.web import Web

KEPT_FREE = "kept free (host.min_free_disk)"


@dataclass(frozen=True, slots=True)
class Terms:
    """How a checkpoint is to be fetched.

    Attributes:
        models: folder of all checkpoints.
        rate: bytes a second in all; None does not limit.
        parallel: files at the same time.
        min_free: bytes of the disk that are left free.
        patience: when to give up.
    """

    models: Path
    rate: int | None = None
    parallel: int = 4
    min_free: int = 0
    patience: Patience = field(default_factory=Patience)


def bring(origin: Origin, terms: Terms, tell: Tell) -> dict[str, Any]:
    """Have a checkpoint complete on this host.

    What came in an earlier run, or is left of a damaged checkpoint, is used.

    Args:
        origin: where it comes from.
        terms: how.
        tell: called with lines of progress.

    Returns:
        `changed`, `folder`, `bytes` (of the whole) and `fetched` (bytes that came now).

    Raises:
        ToolkitError: it cannot be had whole; nothing that is in use was changed, and what has come is kept.
    """
    source = origin.source
    folder = terms.models / source.folder

    def say(text: str) -> None:
        tell({"line": text})

    with alone(terms.models, source.folder, say):
        try:
            _recover(folder)
            refuse_other(folder, origin.source)
            wrong = damage(folder)
            if wrong and status_of(folder) is not None:
                say(f"{folder}: {shortened(wrong)}")
                wrong = settle(folder, tell)
            if not wrong:
                marker = read_marker(folder)
                size = 0 if marker is None else marker.size
                return {"changed": False, "folder": str(folder), "bytes": size, "fetched": 0}
            return _bring(origin, terms, folder, say, tell)
        except OSError as error:
            raise full(error, folder) from None


def _bring(
    origin: Origin, terms: Terms, folder: Path, say: Callable[[str], None], tell: Tell
) -> dict[str, Any]:
    origin, web, listing = _asked(origin, say)
    if listing.left_out:
        say(f"not fetched: {shortened(list(listing.left_out))}")
    part = folder.with_name(folder.name + PART)
    known = prepare(part, folder, listing)
    wanted = [file for file in listing.files if file.path not in known]
    parts = [(origin.source.folder, to_come(part, wanted)), (KEPT_FREE, terms.min_free)]
    if (short := shortage(parts, free_below(terms.models), terms.models)) is not None:
        raise ToolkitError(short, hint="free some space, or keep less free: host.min_free_disk")
    if not take(part, wanted):
        say(f"{terms.models}: this file system cannot reserve space, so that it may still become full")
    say(f"{len(listing.files)} files, {size_words(listing.size)}, from {_from(origin)}")
    means = Means(web, Bucket(terms.rate), Meter(listing.size, tell), say, terms.patience)
    marks = _fetch(part, listing, known, terms.parallel, means)
    fetched = sum(mark.size for path, mark in marks.items() if path not in known)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_marker(part, Marker(listing.origin or str(origin.source), marks, listing.revision, now))
    for name in (LISTED, ARRIVED):
        (part / name).unlink(missing_ok=True)
    os.sync()
    _put_in_place(part, folder)
    return {"changed": True, "folder": str(folder), "bytes": listing.size, "fetched": fetched}


def _asked(origin: Origin, say: Callable[[str], None]) -> tuple[Origin, Web, Listing]:
    """The listing, and whom it is from: the source itself where its peer cannot be asked."""
    web = origin.web()
    try:
        return origin, web, origin.listing(web)
    except ToolkitError as error:
        if origin.peer is None or origin.source.kind == "peer":
            raise
        say(f"{error.message}; it is fetched from {origin.source} instead")
    direct = replace(origin, peer=None)
    web = direct.web()
    return direct, web, direct.listing(web)


def _from(origin: Origin) -> str:
    return str(origin.source) if origin.peer is None else f"a peer, {origin.peer.url}"


def refuse_other(folder: Path, source: Source) -> None:
    """Refuse a folder of the same name that came from somewhere else, unless its content is pinned by hash.

    Raises:
        ToolkitError: it did.
    """
    marker = read_marker(folder)
    if marker is None or source.kind != "https" or source.revision.startswith(PIN):
        return
    if marker.source != str(source):
        raise ToolkitError(
            f"{folder} holds {marker.source}, not {source}",
            hint="give it another revision in the profile, or remove that one: ddtoolkit models rm",
        )


def _fetch(
    part: Path, listing: Listing, known: dict[str, Mark], parallel: int, means: Means
) -> dict[str, Mark]:
    """All files, some at the same time; after a failure none is begun, and what has come stays."""
    noting = threading.Lock()

    def one(file: File) -> tuple[str, Mark]:
        if file.path in known:
            means.meter.have(file.size)
            return file.path, known[file.path]
        try:
            sha256 = Arrival(part / file.path, file, means).run()
            if (why := shape_problem(part / file.path)) is not None:
                (part / file.path).unlink()
                raise ToolkitError(f"{file.url} {why}: the source's copy is damaged")
            mark = mark_of(part / file.path, sha256)
            with noting:
                note_arrived(part, file.path, mark)
        except BaseException:
            means.stop.set()
            raise
        return file.path, mark

    # The largest first, so that none of them is left alone at the end.
    order: Sequence[File] = sorted(listing.files, key=lambda file: -file.size)
    with means.meter, ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(partial(one, file)) for file in order]
        errors = [error for future in futures if (error := future.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, StoppedError))  # the cause before what it stopped
    if errors:
        raise errors[0]
    return dict(future.result() for future in futures)


def _put_in_place(part: Path, folder: Path) -> None:
    """Rename the complete folder, beside which the damaged one stays until then."""
    old = folder.with_name(f".{folder.name}{OLD}")
    shutil.rmtree(old, ignore_errors=True)
    for path in (part, *(path for path in part.rglob("*") if path.is_dir())):
        path.chmod(0o755)  # whoever serves reads it, whatever the umask here
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    part.rename(folder)
    fsync_dir(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _recover(folder: Path) -> None:
    """End a run that ended between the two renames."""
    part, old = folder.with_name(folder.name + PART), folder.with_name(f".{folder.name}{OLD}")
    if status_of(folder) is None and status_of(old) is not None:
        (old if read_marker(part) is None else part).rename(folder)
    if status_of(folder) is None and read_marker(part) is not None and not damage(part):
        part.rename(folder)
    if status_of(folder) is not None:
        shutil.rmtree(old, ignore_errors=True)
