"""What the builds of both engines record: versions, the device, hashes of checkpoints; and their cache.

Importing this loads torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_BUNDLED = Path(__file__).parent / "bundled"
_CHUNK = 1 << 20
_ARRIVED = ".weights.json"  # with size, time, inode and hash of each file, where the deployment fetched them


class BuildError(Exception):
    """The engine cannot be built here; the message is one line."""


def conclude(make: Callable[[], dict[str, Any]], out: Path, *expected: type[Exception]) -> int:
    """Make a manifest and write it; the exit status of a build's program.

    Args:
        make: builds.
        out: where the manifest goes.
        expected: what `make` raises, besides BuildError, of what cannot be served; told in one line.
    """
    told: tuple[type[Exception], ...] = (BuildError, *expected)
    try:
        manifest = make()
    except told as error:
        print(f"ddtree build: {error}", file=sys.stderr)
        return 2
    try:
        write_json(out, manifest)
    except OSError as error:
        print(f"ddtree build: {out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def say(line: str) -> None:
    """Write a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def checkpoint(path: str, part: str) -> Path:
    """The folder of a checkpoint; `bundled` is the one in the package."""
    return _BUNDLED / part if path == "bundled" else Path(path)


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Version of Python and of each distribution.

    Raises:
        BuildError: one is missing; triton may be.
    """
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if package != "triton":  # published for Linux only, and not needed on a CPU
                raise BuildError(f"{package} is not installed in {sys.prefix}") from None
    return found


def device_facts(kind: str) -> dict[str, Any]:
    """What kernels and tuned values depend on: of `cpu`, or of the first GPU (`cuda`).

    Raises:
        BuildError: torch sees no GPU.
    """
    if kind == "cpu":
        return {
            "kind": "cpu",
            "name": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
        }
    if not torch.cuda.is_available():
        raise BuildError(
            f"torch {torch.__version__} sees no CUDA device; check the driver with nvidia-smi, and that this "
            f"torch is built for CUDA (torch.version.cuda is {torch.version.cuda})"
        )
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _driver_version() -> str:
    """Version of the NVIDIA kernel driver, from its own file; empty if it has none."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hashes(directory: Path, cache: Cache) -> dict[str, Any]:
    """SHA-256 of each file of a checkpoint, read again only if size, time or inode changed."""
    files, arrived = {}, _arrived(directory)
    for path in sorted(path for path in directory.iterdir() if path.is_file() and path.name != _ARRIVED):
        status = path.stat()
        mark = [status.st_size, status.st_mtime_ns, status.st_ino]
        known = arrived.get(path.name)
        if known is None or known["mark"] != mark:
            known = cache.get("hashes", str(path.resolve()))
        if not isinstance(known, dict) or known.get("mark") != mark:
            say(f"hashing {path.name}, {status.st_size / 1e6:.1f} MB")
            known = {"mark": mark, "sha256": _sha256(path)}
            cache.put("hashes", str(path.resolve()), known)
        files[path.name] = {"size": status.st_size, "sha256": known["sha256"]}
    return {"path": str(directory), "files": files}


def _arrived(directory: Path) -> dict[str, dict[str, Any]]:
    """Hashes that were taken while the checkpoint was fetched, by file; {} for one that came otherwise."""
    try:
        listed = json.loads((directory / _ARRIVED).read_bytes())["files"]
        return {
            name: {"mark": [item["size"], item["mtime_ns"], item["inode"]], "sha256": str(item["sha256"])}
            for name, item in listed.items()
            if not item["corrupt"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 over JSON-safe values, hexadecimal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Cache:
    """Values kept between builds, one JSON file each; what cannot be read or written is no error."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def get(self, kind: str, key: str) -> Any:
        """A value, or None."""
        path = self._path(kind, key)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def put(self, kind: str, key: str, value: Any) -> None:
        """Keep a value."""
        path = self._path(kind, key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, value)
        except OSError as error:
            say(f"the cache {path.parent} cannot be written: {error.strerror}")

    def _path(self, kind: str, key: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        temporary = Path(file.name)
        try:
            json.dump(value, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
