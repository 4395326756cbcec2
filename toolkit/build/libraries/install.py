"""Installing what a lock asks for into a virtual environment beside its place, which it takes when complete.

pip checks every file against the lock's hashes (`--require-hashes`) and takes wheels only, so that nothing is
built on the host. What was downloaded stays until the environment is complete: a run that was ended goes on
from there. A damaged environment stays until then, too: what serves, and what installs, may run under it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.build.lock import CUDA, Lock, needs_cuda
from toolkit.errors import ToolkitError
from toolkit.files import fsync_dir, read_json

MODULE = "toolkit.build.libraries"  # installs them, as a program
MARKER = "libraries.json"
NEW, OLD = ".new", ".old"
_KEPT_LINES = 60
_FULL = 8 << 20
_PROBE_LIMIT = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where libraries are installed and from where.

    Attributes:
        environments: folder of all environments.
        wheels: folder for downloads, a folder for each lock, kept until they are installed.
        wheelhouse: folder with wheels to take them from; None: the package index that pip is set to.
    """

    environments: Path
    wheels: Path
    wheelhouse: Path | None = None


def interpreter(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def damage(folder: Path, sha256: str) -> str | None:
    """What is wrong with the libraries in `folder`; None where they are complete.

    Args:
        folder: their virtual environment.
        sha256: of the lock that they are to be of.
    """
    marker = _marker(folder)
    if marker is None:
        return f"{folder} is missing or was not finished"
    if marker.get("lock") != sha256:
        return f"{folder / MARKER} is of another lock"
    if not interpreter(folder).exists():
        return f"{interpreter(folder)} is missing: Python was replaced or removed"
    return None


def versions(folder: Path) -> dict[str, str]:
    """Version of each distribution in a complete environment, and of `python`; {} without a marker."""
    found = (_marker(folder) or {}).get("versions")
    return found if isinstance(found, dict) else {}


def ensure(lock: Lock, place: Place, say: Say) -> bool:
    """Have the libraries complete; whether anything had to be done.

    Args:
        lock: what to install.
        place: where, and from where.
        say: called with lines of progress.

    Raises:
        ToolkitError: pip failed, a hash differs, the disk is full; what was downloaded is kept.
    """
    folder = place.environments / lock.folder_name
    with _alone(folder, say):
        if damage(folder, lock.sha256) is None:
            return False
        made = folder.with_name(f".{folder.name}{NEW}")
        try:
            _install(lock, made, place, say)
            _put_in_place(made, folder)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise _full_or(error, folder) from None
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        shutil.rmtree(place.wheels / lock.folder_name, ignore_errors=True)
    with contextlib.suppress(OSError):  # another lock's downloads are in it
        place.wheels.rmdir()
    return True


def _install(lock: Lock, folder: Path, place: Place, say: Say) -> None:
    downloads = place.wheels / lock.folder_name  # of its own: another engine's may be installed meanwhile
    downloads.mkdir(parents=True, exist_ok=True)
    if place.wheelhouse is not None and not place.wheelhouse.is_dir():
        raise ToolkitError(
            f"no wheelhouse {place.wheelhouse} on this host",
            hint="make one with: ddtoolkit wheelhouse --out DIR; then bring it there",
        )
    shutil.rmtree(folder, ignore_errors=True)
    say(f"making {folder}")
    _run([sys.executable, "-m", "venv", str(folder)], say, place)
    pip = [str(interpreter(folder)), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    strict = [
        "--require-hashes",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--progress-bar=off",
    ]
    offline = [] if place.wheelhouse is None else ["--no-index", "--find-links", str(place.wheelhouse)]
    download = [*pip, "download", *strict, *offline, "--dest", str(downloads)]
    # Whether a build of torch needs the CUDA libraries is known from its wheel only.
    torch = _written(downloads / "torch.txt", lock.only(lambda name: name == "torch"))
    online = place.wheelhouse is None
    _run([*download, "-r", str(torch)], say, place, settings=online)
    cuda = any(map(needs_cuda, downloads.glob("torch-*.whl")))
    wanted = _written(downloads / "wanted.txt", lock.only(lambda name: cuda or not name.startswith(CUDA)))
    if online:
        _run([*download, "-r", str(wanted)], say, place)
    say("installing")
    sources = ["--no-index", "--find-links", str(downloads), *offline[1:]]
    _run([*pip, "install", *strict, *sources, "-r", str(wanted)], say, place, settings=False)
    _finish(lock, folder, cuda=cuda)


def _put_in_place(made: Path, folder: Path) -> None:
    """Let the complete environment take its place; programs and settings in it name their own path."""
    here, there = os.fsencode(made.name), os.fsencode(folder.name)
    for path in (made / "pyvenv.cfg", *(made / "bin").iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if here in data and b"\0" not in data:
            path.write_bytes(data.replace(here, there))
    os.sync()
    old = folder.with_name(f".{folder.name}{OLD}")
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    made.rename(folder)
    fsync_dir(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _finish(lock: Lock, folder: Path, *, cuda: bool) -> None:
    """Write the marker, when everything before it is on the disk."""
    program = [str(interpreter(folder)), "-I", "-c"]
    query = "import json, platform; from importlib.metadata import distributions as all_of; print(json.dumps("
    query += "{'python': platform.python_version()} | {d.name.lower(): d.version for d in all_of()}))"
    shown = subprocess.run(
        [*program, query], capture_output=True, text=True, timeout=_PROBE_LIMIT, check=True
    ).stdout
    marker = {"lock": lock.sha256, "engine": lock.engine, "cuda": cuda, "versions": json.loads(shown)}
    (folder / MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _run(command: Sequence[str], say: Say, place: Place, *, settings: bool = True) -> None:
    """Run a program to its end, telling what it collects; without `settings`, pip has none but its options.

    Raises:
        ToolkitError: it failed.
    """
    kept: deque[str] = deque(maxlen=_KEPT_LINES)
    left_out = ("PYTHON",) if settings else ("PYTHON", "PIP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    if not settings:
        environment["PIP_CONFIG_FILE"] = os.devnull
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment | {"LC_ALL": "C.UTF-8"},
    ) as child:
        assert child.stdout is not None  # noqa: S101  Popen was told to make it
        for line in child.stdout:
            kept.append(line.rstrip())
            if line.startswith(("Collecting ", "Downloading ", "  Downloading ", "Installing ")):
                say(line.strip()[:200])
    if child.returncode != 0:
        raise _failure(list(kept), command, place)


def _failure(lines: list[str], command: Sequence[str], place: Place) -> ToolkitError:
    """What a failed program's output comes to."""
    text = "\n".join(lines)
    # A venv's own complaint does not tell why.
    if "No space left on device" in text or shutil.disk_usage(place.environments).free < _FULL:
        return _full_or(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), place.environments)
    where = "the package index" if place.wheelhouse is None else f"the wheelhouse {place.wheelhouse}"
    if "DO NOT MATCH THE HASHES" in text:
        bad = re.search(r"^\s*(\S+==\S+|\S+\.whl)[^\n]*:\s*\n\s*Expected sha256", text, re.MULTILINE)
        what = bad[1] if bad else "a distribution"
        return ToolkitError(
            f"{what} from {where} is not the file that the lock names: its sha256 differs",
            hint="a damaged or replaced file: bring it there anew; it was not installed",
        )
    if missing := re.search(r"No matching distribution found for (\S+)", text):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        hint = "pip's settings on the host name the index; or set host.wheelhouse"
        if place.wheelhouse is not None:
            hint = f"ddtoolkit wheelhouse --out DIR --python {version}; then bring it to {place.wheelhouse}"
        return ToolkitError(
            f"{missing[1]} for Python {version} on {os.uname().machine} is not in {where}", hint=hint
        )
    if "ensurepip is not" in text or "No module named venv" in text:
        return ToolkitError(
            "this host's Python cannot make virtual environments", hint="apt install python3-venv"
        )
    last = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no output")
    return ToolkitError(
        f"{Path(command[0]).name} failed: {last.strip()[:500]}", hint="run it again: it goes on"
    )


def _full_or(error: OSError, folder: Path) -> ToolkitError:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return ToolkitError(
        f"{error.filename or folder}: {error.strerror} ({free >> 20} MiB are free)",
        hint="free some space and run the same command again: it goes on with what is downloaded",
    )


def _marker(folder: Path) -> dict[str, Any] | None:
    value = read_json(folder / MARKER)
    return value if isinstance(value, dict) else None


@contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    """One build of a folder at a time, whoever asks for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build of it is under way; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
