"""Hash-locked requirement files (pip's hash-checking mode), one an engine."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toolkit.errors import ConfigError

LOCKS = Path(__file__).resolve().with_name("locks")
CONTROL = "control"  # the lock of the machine that deploys; every other one is an engine's
CUDA = ("nvidia-", "cuda-", "triton")  # how the names begin of what only a torch with CUDA asks for
_NEEDS_CUDA = re.compile(r"^Requires-Dist: (?:nvidia|cuda)-", re.MULTILINE)
_DIGITS = 16
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock.

    Attributes:
        engine: whose it is.
        text: the requirement file.
    """

    engine: str
    text: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the requirement file, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        """Name of the folder that holds what it asks for."""
        return f"lib-{self.sha256[:_DIGITS]}"

    def blocks(self) -> list[str]:
        """One requirement each: its first line, and those with its hashes."""
        found: list[str] = []
        for line in self.text.splitlines(keepends=True):
            if line.startswith("#") or not line.strip():
                continue
            if line[0].isspace() and found:
                found[-1] += line
            else:
                found.append(line)
        return found

    def versions(self) -> dict[str, str]:
        """Version of each distribution; one that depends on the Python version has the last one listed."""
        matches = map(_REQUIREMENT.match, self.blocks())
        return {match[1]: match[2] for match in matches if match}

    def pins(self) -> set[tuple[str, str]]:
        """Distribution and version of each requirement, whatever its marker."""
        matches = map(_REQUIREMENT.match, self.blocks())
        return {(match[1], match[2]) for match in matches if match}

    def only(self, wanted: Callable[[str], bool]) -> str:
        """The requirement file with those distributions alone whose names are `wanted`."""
        return "".join(block for block in self.blocks() if (m := _REQUIREMENT.match(block)) and wanted(m[1]))


@cache
def lock_of(engine: str) -> Lock:
    """The lock of an engine.

    Raises:
        ConfigError: there is none.
    """
    path = LOCKS / f"{engine}.txt"
    try:
        return Lock(engine, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"engine {engine!r} has no locked requirements: {error.strerror}",
            hint=f"one of: {', '.join(engines())}",
        ) from None


def engines() -> list[str]:
    """Names of the engines that have a lock."""
    return sorted(path.stem for path in LOCKS.glob("*.txt") if path.stem != CONTROL)


def needs_cuda(wheel: Path) -> bool:
    """Whether this build of torch loads the CUDA libraries."""
    with zipfile.ZipFile(wheel) as packed:
        name = next(item for item in packed.namelist() if item.endswith(".dist-info/METADATA"))
        return _NEEDS_CUDA.search(packed.read(name).decode("utf-8", "replace")) is not None
