"""What is there of a checkpoint already: of a run that was ended, or of a damaged folder."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from toolkit.files import json_bytes, read_json, replace_file
from toolkit.weights.listing import Listing
from toolkit.weights.store import Mark, read_marker, status_of

LISTED = ".listing.json"  # what a run was to fetch
ARRIVED = ".arrived"  # what of it is complete, a JSON line a file


def prepare(part: Path, folder: Path, listing: Listing) -> dict[str, Mark]:
    """Have in the part what is good of earlier runs and of a damaged folder; the marks of complete files."""
    part.mkdir(mode=0o755, exist_ok=True)
    before = {item["path"]: item for item in read_json(part / LISTED) or ()}
    arrived = _arrived(part)
    good = _good(folder, listing)
    known: dict[str, Mark] = {}
    for file in listing.files:
        path = part / file.path
        if file.path in good:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.hardlink_to(folder / file.path)  # the very file: its inode stays, what serves keeps it
            known[file.path] = good[file.path]
        elif not file.same(before.get(file.path, {})):
            path.unlink(missing_ok=True)
        elif (mark := arrived.get(file.path)) and (status := status_of(path)) and mark.fits(status):
            known[file.path] = mark
    wanted = {file.path for file in listing.files}
    for path in [item for item in part.rglob("*") if not item.is_dir() or item.is_symlink()]:
        if path.relative_to(part).as_posix() not in {*wanted, ARRIVED}:
            path.unlink()
    replace_file(part / LISTED, json_bytes([asdict(file) for file in listing.files]))
    return known


def note_arrived(part: Path, name: str, mark: Mark) -> None:
    """Note that a file is complete.

    Raises:
        OSError: the disk is full; it names the file.
    """
    path = part / ARRIVED
    text = json.dumps({"path": name, **asdict(mark)})
    try:
        with path.open("a", encoding="utf-8") as note:
            note.write(f"\n{text}\n")  # a line that an earlier run could not end is ended here
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _good(folder: Path, listing: Listing) -> dict[str, Mark]:
    """Files of a damaged checkpoint that are as they came and as they are wanted."""
    marker = read_marker(folder)
    if marker is None:
        return {}
    found = {}
    for file in listing.files:
        mark, status = marker.files.get(file.path), status_of(folder / file.path)
        whole = mark is not None and status is not None and mark.fits(status) and not mark.corrupt
        if mark is not None and whole and mark.size == file.size and file.sha256 in (None, mark.sha256):
            found[file.path] = mark
    return found


def _arrived(part: Path) -> dict[str, Mark]:
    """What earlier runs have completed, as they noted it."""
    found = {}
    with contextlib.suppress(OSError):
        for line in (part / ARRIVED).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # the last line may be cut
                item = json.loads(line)
                found[item.pop("path")] = Mark(**item)
    return found
