"""What a checkpoint consists of, as its source lists it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.errors import ToolkitError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS = ".safetensors"
_PART = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")
_DEPTH = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class File:
    """One file.

    Attributes:
        path: relative, with `/`.
        size: bytes.
        url: where it is.
        sha256: hexadecimal; None where the source does not publish it.
        git: git's name for its content (SHA-1 of "blob SIZE NUL CONTENT"); None where there is none.
        validator: strong entity tag (RFC 9110, 8.8.3), by which a file without a hash is told from another.
    """

    path: str
    size: int
    url: str
    sha256: str | None = None
    git: str | None = None
    validator: str | None = None

    def same(self, other: dict[str, Any]) -> bool:
        """Whether a file that was listed before has the same content."""
        mine = asdict(self)
        return all(mine[key] == other.get(key) for key in ("path", "size", "sha256", "git", "validator"))


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a checkpoint.

    Attributes:
        files: to fetch.
        revision: commit that the source's revision stands for; None where it has no such thing.
        left_out: files of the source that are not fetched.
        origin: where a peer has it from; None where the source itself was asked.
    """

    files: Sequence[File]
    revision: str | None = None
    left_out: Sequence[str] = field(default=())
    origin: str | None = None

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files)


def checked(files: Iterable[File], source: object) -> tuple[File, ...]:
    """The files, when each may be written and they are a checkpoint.

    Args:
        files: what the source lists.
        source: its name, for messages.

    Raises:
        ToolkitError: a path leaves the folder, a file is pickled, is listed twice, or no weights are there.
    """
    found: dict[str, File] = {}
    for file in files:
        if (why := path_problem(file.path)) is not None:
            raise ToolkitError(f"{source} lists {file.path!r}, which {why}: nothing was fetched")
        if file.path in found:
            raise ToolkitError(f"{source} lists {file.path} twice: nothing was fetched")
        if file.sha256 is not None and not _SHA256.fullmatch(file.sha256):
            raise ToolkitError(f"{source} lists {file.path} with {file.sha256!r}, which is no SHA-256")
        found[file.path] = file
    for path in found:
        if any(parent in found for parent in _parents(path)):
            raise ToolkitError(f"{source} lists {path} below a file: nothing was fetched")
    if not any(path.endswith(WEIGHTS) for path in found):
        raise ToolkitError(
            f"{source} has no {WEIGHTS} file",
            hint="only safetensors are served: pickled checkpoints can run code when they are read",
        )
    return tuple(sorted(found.values(), key=lambda file: file.path))


def path_problem(path: str) -> str | None:
    """Why a file of this path is not written; None where it may be."""
    parts = path.split("/")
    if len(parts) > _DEPTH or not all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
        return "is no plain path below the checkpoint's folder"
    if any(part.startswith(".") for part in parts):
        return "is hidden"
    if is_pickled(path):
        return "is a pickle: it can run code when it is read; only safetensors are served"
    return None


def is_pickled(path: str) -> bool:
    """Whether a file is of a kind that Python's pickle reads."""
    return path.lower().endswith(PICKLED)


def _parents(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))
