"""This package as an archive for hosts, named by the hash of what it holds."""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import cache
from pathlib import Path

from toolkit.build.bootstrap import DIGITS
from toolkit.build.environment import package_digest

_PACKAGE = Path(__file__).resolve().parents[1]
_FASTEST = 1  # most of it is model weights, which do not compress


def digest() -> str:
    """Name of the package's content: 16 hexadecimal digits."""
    return package_digest()[:DIGITS]


@cache
def archive() -> bytes:
    """The package as a gzip-compressed tar archive, files only, owned by root."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=_FASTEST, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for path in sorted(_PACKAGE.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                tar.add(path, f"toolkit/{path.relative_to(_PACKAGE)}", recursive=False, filter=_plain)
    return packed.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o644
    entry.mtime = 0
    return entry
