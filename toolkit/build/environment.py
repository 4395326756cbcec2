"""Engine environments: immutable, named by the hash of what they hold, shared between releases.

An environment is a copy of this package, with the entry points by which SGLang finds its plugin; the
libraries are an interpreter's. A release therefore keeps running the code it was accepted with, whatever
becomes of the checkout or the installation it came from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import toolkit
from toolkit.build.bootstrap import tree_digest
from toolkit.build.libraries import install as libraries
from toolkit.build.lock import CUDA, Lock
from toolkit.errors import ToolkitError
from toolkit.files import read_json

_NEEDED = {
    "embedded": ("torch", "tokenizers", "safetensors", "fastapi", "uvicorn", "prometheus-client"),
    "sglang": ("sglang", "torch", "triton", "transformers", "tokenizers", "safetensors"),
}
# What else matters to results.
_LIBRARIES = {
    "embedded": (*_NEEDED["embedded"], "triton", "numpy"),
    "sglang": (*_NEEDED["sglang"], "sglang-kernel", "flashinfer-python", "xgrammar", "numpy"),
}
_EXTRAS = {"embedded": "engine", "sglang": "sglang"}
_PACKAGE = Path(__file__).resolve().parents[1]
MARKER = "environment.json"
_QUERY_LIMIT = 60.0
# -I keeps the caller's PYTHONPATH and folder out: only what the interpreter itself has counts.
_QUERY = """
import json, platform, sys
from importlib import metadata
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
print(json.dumps(versions))
"""


# As pyproject.toml has it.
_ENTRY_POINTS = "[sglang.srt.plugins]\nddtree = toolkit.ddtree.sglang.plugin:register\n"


@dataclass(frozen=True, slots=True)
class Environment:
    """What the engine runs in.

    Attributes:
        python: interpreter that has the libraries.
        versions: version of Python and of each library that matters to results.
        source: sha256 over the package's files.
        lock: sha256 of the lock that the libraries are of; None for an interpreter that was there before.
        pins: versions that the lock allows of each library, as long as they are not installed; `versions` has
            one of them then, and no `python`.
    """

    python: Path
    versions: dict[str, str]
    source: str
    lock: str | None = None
    pins: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def libraries(self) -> Path | None:
        """The folder of libraries that are of a lock; None without one."""
        return None if self.lock is None else self.python.parents[1]

    @property
    def digest(self) -> str:
        """Name of the environment: 16 hexadecimal digits over everything in it."""
        content = json.dumps([str(self.python), self.versions, self.source], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def differences(self, built: Mapping[str, Any]) -> list[str]:
        """What differs from the environment that a release's manifest tells of, a line each.

        Of libraries that are yet to be installed only that is told which the lock says for sure.
        """
        before: dict[str, str] = built.get("versions", {})
        lines = [
            f"{name} {before.get(name, 'none')} -> {self.versions.get(name, 'none')}"
            for name in sorted({*self.versions, *before})
            if before.get(name) != self.versions.get(name) and not self._may_stay(name, before, built)
        ]
        if built.get("source") != self.source:
            lines.append("the toolkit's own code changed")
        if not lines and built.get("python") != str(self.python):
            of_locks = self.lock is not None and built.get("lock") is not None
            lines.append(
                f"libraries of another lock: {self.libraries}"
                if of_locks
                else f"another interpreter: {self.python}"
            )
        return lines

    def _may_stay(self, name: str, before: Mapping[str, str], built: Mapping[str, Any]) -> bool:
        """Whether a library that is yet to be installed may turn out to be the one of before."""
        if not self.pins:
            return False
        if built.get("lock") == self.lock or name == "python":
            return True
        version = before.get(name)
        if version is None:
            return name.startswith(CUDA)  # these come only with a torch that asks for them
        return version.partition("+")[0] in {pin.partition("+")[0] for pin in self.pins.get(name, ())}


def environment_under(python: str | None = None, engine: str = "embedded") -> Environment:
    """The environment of an engine under an interpreter that has its libraries.

    Args:
        python: the interpreter (`host.python`); None: the one that runs now.
        engine: `embedded` or `sglang`.

    Raises:
        ToolkitError: it cannot be run, or lacks a library that the engine needs.
    """
    program = Path(sys.executable if python is None else python).expanduser()
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(_versions, program, _LIBRARIES[engine])
        source = package_digest()  # meanwhile
        versions = answer.result()
    absent = [name for name in _NEEDED[engine] if name not in versions]
    if absent:
        raise ToolkitError(
            f"the {engine} engine needs {', '.join(absent)}, which {program} does not have",
            hint=f"in a checkout of ddtoolkit: {program} -m pip install '.[{_EXTRAS[engine]}]'",
        )
    return Environment(python=program, versions=versions, source=source)


def locked_environment(lock: Lock, environments: Path) -> Environment:
    """The environment of an engine whose libraries are of a lock, installed already or not yet."""
    folder = environments / lock.folder_name
    names = ("python", *_LIBRARIES[lock.engine])
    installed, pins = libraries.versions(folder), dict[str, list[str]]()
    if not installed:
        for name, version in sorted(lock.pins()):
            pins.setdefault(name, []).append(version)
        installed = lock.versions()
    versions = {name: installed[name] for name in names if name in installed}
    return Environment(libraries.interpreter(folder), versions, package_digest(), lock.sha256, pins)


def _versions(python: Path, libraries: Sequence[str]) -> dict[str, str]:
    """Version of the interpreter and of each library that it has."""
    command = [str(python), "-I", "-c", _QUERY, *libraries]
    hint = "host.python names the interpreter that has the engine's libraries"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_QUERY_LIMIT,
            check=False,
        )
        versions: dict[str, str] = json.loads(done.stdout)
    except OSError as error:
        raise ToolkitError(f"{python} cannot be run: {error.strerror}", hint=hint) from None
    except (ValueError, subprocess.TimeoutExpired):
        raise ToolkitError(f"{python} does not run as a Python interpreter", hint=hint) from None
    return versions


def materialise(environment: Environment, folder: Path) -> Path:
    """Make `environment` below `folder`, or find it there; its path.

    It is built in place beside its final name and renamed, marker last, so a half-made one is never used.

    Raises:
        ToolkitError: the copy cannot be written; nothing is left behind.
    """
    target = folder / environment.digest
    if damage(target) is None:
        # No release needs it yet, where it is another service's: what is young is not removed as unused.
        for used in filter(None, (target, environment.libraries)):
            with contextlib.suppress(OSError):
                os.utime(used)
        return target
    with contextlib.ExitStack() as held:
        try:
            staging = Path(tempfile.mkdtemp(prefix=f".{environment.digest}-", dir=folder))
            held.enter_context(_locked(staging))
        except OSError as error:
            raise ToolkitError(f"cannot write below {folder}: {error.strerror}") from None
        return _fill(staging, environment, target)


def abandoned(folder: Path) -> Iterator[Path]:
    """Half-made environments below `folder` whose makers are dead."""
    for path in folder.glob(".[0-9a-f]*-*"):
        with contextlib.suppress(OSError), _locked(path):
            yield path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a flock on a folder; it ends with the process.

    Raises:
        OSError: someone else holds it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _fill(staging: Path, environment: Environment, target: Path) -> Path:
    folder = target.parent
    try:
        shutil.copytree(_PACKAGE, staging / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
        content = {
            "python": str(environment.python),
            "versions": environment.versions,
            "source": environment.source,
            "lock": environment.lock,
        }
        _write_metadata(staging)
        (staging / MARKER).write_text(json.dumps(content, indent=2), encoding="utf-8")
        _open_to_all(staging)
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(staging, ignore_errors=True)
        reason = getattr(error, "strerror", None) or _first_reason(error)
        raise ToolkitError(
            f"cannot make the environment {target}: {reason}", hint=f"free space below {folder} and run again"
        ) from None
    return target


def _first_reason(error: BaseException) -> str:
    """Why the first file of a tree could not be copied; shutil names every one of them."""
    files = error.args[0] if error.args else None
    return str(files[0][-1]) if isinstance(files, list) and files else str(error)


def _write_metadata(folder: Path) -> None:
    """Let programs find the package's entry points there (packaging.python.org, "Entry points")."""
    place = folder / f"ddtoolkit-{toolkit.__version__}.dist-info"
    place.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: ddtoolkit\nVersion: {toolkit.__version__}\n"
    (place / "METADATA").write_text(metadata, encoding="utf-8")
    (place / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")


def _open_to_all(folder: Path) -> None:
    """Let every user read it, whatever the umask and the modes of what was copied."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def damage(folder: Path) -> str | None:
    """What is wrong with the environment in `folder`; None where it is complete."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"{folder} is missing"
    content = read_json(marker)
    if not isinstance(content, dict):
        return f"{marker} is damaged"
    lock = content.get("lock")
    return None if lock is None else libraries.damage(Path(content["python"]).parents[1], lock)


@cache
def package_digest() -> str:
    """SHA-256 over the names and contents of this package's files, hexadecimal."""
    return tree_digest(_PACKAGE)
