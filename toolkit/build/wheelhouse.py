"""A folder with all that machines without a package index install: wheels, locks, checksums, the toolkit.

It serves the hosts and, so that a second trip is not needed for some 70 MB, the machine that deploys.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags

import toolkit
from toolkit.build import package
from toolkit.build.lock import CONTROL, CUDA, Lock, lock_of, needs_cuda
from toolkit.build.project_wheel import NAME, make_wheel
from toolkit.errors import ConfigError, ToolkitError

CHECKSUMS = "SHA256SUMS"  # as sha256sum(1) reads it
_MARKER = re.compile(r";\s*([^\\\n]+)")
_SUM = re.compile(r"[0-9a-f]{64}  [^/]+")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_CHUNK = 1 << 20
# Newest first: pip takes the first tag that a wheel matches.
_GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
_PYTHON = re.compile(r"^3\.(1[1-9]|[2-9]\d)$")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The hosts that wheels are for: Linux on this architecture.

    Attributes:
        python: their Python, "3.12".
        machine: as `uname -m` says, "x86_64".
    """

    python: str
    machine: str

    def __post_init__(self) -> None:
        if not _PYTHON.match(self.python):
            raise ConfigError(f"Python {self.python!r} is none that is supported", hint="3.11 or newer: 3.12")

    def wants(self, block: str) -> bool:
        """Whether a requirement's marker holds there (PEP 508)."""
        found = _MARKER.search(block)
        full = f"{self.python}.0"
        there = {
            "python_version": self.python,
            "python_full_version": full,
            "implementation_version": full,
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": self.machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }
        return found is None or Marker(found[1].strip()).evaluate(there)

    def tags(self) -> list[Tag]:
        """Tags of wheels that can be installed there, the best first (PEP 425)."""
        version = (3, int(self.python.partition(".")[2]))
        platforms = self._platforms()
        own = cpython_tags(version, platforms=platforms)
        return [*own, *compatible_tags(version, f"cp3{version[1]}", platforms)]

    def flags(self) -> list[str]:
        """What makes pip take wheels for there."""
        flags = ["--implementation", "cp", "--python-version", self.python]
        for platform_tag in self._platforms():
            flags += ["--platform", platform_tag]
        return flags

    def _platforms(self) -> list[str]:
        found = [f"manylinux_2_{minor}_{self.machine}" for minor in _GLIBC]
        return [*found, f"manylinux2014_{self.machine}"]


def here() -> Target:
    """Hosts like this machine."""
    return Target(f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())


def make(
    lock: Lock,
    out: Path,
    target: Target,
    given: Sequence[Path],
    say: Say,
    *,
    control: Target | None = None,
) -> list[Path]:
    """Fill a folder; a run that was ended goes on with what is there.

    Args:
        lock: what hosts install.
        out: the folder, made when it is missing.
        target: the hosts.
        given: wheels to take instead of the index's, such as a build of torch without CUDA.
        say: called with lines of progress.
        control: the machine that deploys, for which this project's own wheel and all that it needs are put
            there too; None: they are left out.

    Returns:
        The wheels.

    Raises:
        ConfigError: a given wheel is none that the lock names.
        ToolkitError: pip failed, or the folder cannot be written.
    """
    blocks = [block for block in lock.blocks() if target.wants(block)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for wheel in given:
            blocks = _take(wheel, blocks, out)
        if any(wheel.name.startswith("torch-") and not needs_cuda(wheel) for wheel in given):
            blocks = [block for block in blocks if not block.startswith(CUDA)]
        _download(blocks, out, target, say)
        if control is not None:
            wanted = [block for block in lock_of(CONTROL).blocks() if control.wants(block)]
            _download(wanted, out, control, say)
        (out / f"{lock.engine}.txt").write_text(lock.text, encoding="utf-8")
        put_project(out, control=control is not None)
    except OSError as error:
        raise ToolkitError(f"{error.filename or out}: {error.strerror}") from None
    return sorted(out.glob("*.whl"))


def put_project(out: Path, *, control: bool) -> None:
    """Put this project itself into a folder in place of another version, and the folder's checksums.

    Args:
        out: the folder.
        control: also its wheel, with a lock of it and all that it needs.

    Raises:
        ToolkitError: no wheel can be made of what runs.
        OSError: the folder cannot be written.
    """
    made = {f"{NAME}-{package.digest()}.tar.gz"}
    (out / f"{NAME}-{package.digest()}.tar.gz").write_bytes(package.archive())
    if control:
        wheel = make_wheel(out)
        made.add(wheel.name)
        pin = f"{NAME}=={toolkit.__version__} \\\n    --hash=sha256:{_sha256(wheel)}\n"
        (out / f"{CONTROL}.txt").write_text(lock_of(CONTROL).text + pin, encoding="utf-8")
    for path in (*out.glob(f"{NAME}-*.tar.gz"), *out.glob(f"{NAME}-*.whl")):
        if path.name not in made:
            path.unlink()
    _write_checksums(out)


def verify(folder: Path) -> list[str]:
    """What of a wheelhouse is missing or differs from its checksums, a line each.

    Raises:
        ToolkitError: it has no checksums.
    """
    faults = []
    for name, wanted in checksums(folder).items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path.name} is missing")
        elif _sha256(path) != wanted:
            faults.append(f"{path.name} differs from its checksum")
    return faults


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a wheelhouse by its name, as its checksums say.

    Raises:
        ToolkitError: it has none, or they are damaged.
    """
    path = folder / CHECKSUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ToolkitError(f"{path}: {reason}", hint="ddtoolkit wheelhouse makes it") from None
    for number, line in enumerate(lines, 1):
        if _SUM.fullmatch(line) is None:
            hint = f"ddtoolkit wheelhouse --out {folder} mends it"
            raise ToolkitError(f"{path}:{number}: is no checksum and name: {line[:80]!r}", hint=hint)
    return {line[66:]: line[:64] for line in lines}


def _take(wheel: Path, blocks: list[str], out: Path) -> list[str]:
    """Copy a given wheel and strike its requirement."""
    if not wheel.is_file():
        raise ConfigError(f"no wheel {wheel}")
    name = wheel.name.partition("-")[0].lower().replace("_", "-")
    found = next((block for block in blocks if block.startswith(f"{name}==")), None)
    if found is None or _sha256(wheel) not in _HASH.findall(found):
        raise ConfigError(
            f"{wheel}: the lock does not name this file", hint="scripts/lock.py --also adds a wheel's hash"
        )
    shutil.copyfile(wheel, out / wheel.name)
    return [block for block in blocks if block is not found]


def _download(blocks: Sequence[str], out: Path, target: Target, say: Say) -> None:
    wanted = out / ".wanted.txt"
    wanted.write_text("".join(re.sub(_MARKER, "", block, count=1) for block in blocks), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--require-hashes", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += [*target.flags(), "--dest", str(out), "-r", str(wanted)]
    kept: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None  # noqa: S101  Popen was told to make it
        for line in child.stdout:
            kept.append(line.rstrip())
            if line.startswith(("Collecting ", "  Downloading ")):
                say(line.strip().partition(" (from")[0])
    wanted.unlink()
    if child.returncode != 0:
        raise _failure(kept, target)


def _failure(lines: Sequence[str], target: Target) -> ToolkitError:
    """What a failed download comes to."""
    missing = re.search(r"No matching distribution found for (\S+)", "\n".join(lines))
    if missing is not None:
        return ToolkitError(
            f"the package index that pip is set to has no wheel of {missing[1]} "
            f"for Python {target.python} on {target.machine}",
            hint="give a file that the lock names with --with WHEEL, or set pip to an index that has it",
        )
    errors = [line for line in lines if "ERROR" in line] or lines
    return ToolkitError(
        f"pip download failed: {' '.join(errors[-2:])[:600]}", hint="run it again: it goes on"
    )


def _write_checksums(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir() if path.is_file() and path.name != CHECKSUMS)
    text = "".join(f"{_sha256(out / name)}  {name}\n" for name in names)
    temporary = out / f".{CHECKSUMS}.{os.getpid()}"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(out / CHECKSUMS)


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            total.update(piece)
    return total.hexdigest()
