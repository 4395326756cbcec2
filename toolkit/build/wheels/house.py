"""A folder that `ddtoolkit wheelhouse` made, on the control machine: which of its wheels a host takes."""

from __future__ import annotations

import re
import threading
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from toolkit.build.lock import CUDA, Lock, needs_cuda
from toolkit.build.wheel_store import Wheel, pin_of, sha256_of
from toolkit.build.wheelhouse import CHECKSUMS, Target, checksums
from toolkit.errors import ConfigError, ToolkitError

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class House:
    """The folder.

    Attributes:
        folder: where it lies on this machine.
        sums: SHA-256 of each file by its name, as the folder's checksums say.
    """

    folder: Path
    sums: Mapping[str, str]
    _checked: dict[str, str] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def wheels_for(self, lock: Lock, target: Target) -> list[Wheel]:
        """The wheels that hosts of one kind need for a lock; nothing is read but names, sizes and an index.

        Raises:
            ConfigError: some are missing, or are not the files that the lock names.
        """
        ranks = {tag: number for number, tag in enumerate(target.tags())}
        found: dict[tuple[str, str], Wheel | None] = {}
        for block in lock.blocks():
            if target.wants(block) and (pin := _PIN.match(block)):
                found[pin[1], pin[2]] = self._best(set(_HASH.findall(block)), ranks)
        torch = next((wheel for (name, _), wheel in found.items() if name == "torch"), None)
        if torch is not None and not self._asks_for_cuda(torch):
            found = {pin: wheel for pin, wheel in found.items() if not pin[0].startswith(CUDA)}
        wheels = [wheel for wheel in found.values() if wheel is not None]
        if len(wheels) < len(found):
            raise self._lacks(lock, [pin for pin, wheel in found.items() if wheel is None], target)
        return wheels

    def check(self, wheels: Iterable[Wheel]) -> None:
        """Read wheels before they are sent; each once, however many hosts they go to.

        Raises:
            ToolkitError: one is not what the checksums say; it is named, and nothing was sent.
        """
        with self._guard:
            for wheel in wheels:
                path = self.folder / wheel.name
                try:
                    found = self._checked.get(wheel.name) or sha256_of(path, follow=True)
                except OSError as error:
                    raise ToolkitError(f"{path}: {error.strerror}; nothing was sent") from None
                self._checked[wheel.name] = found
                if found != wheel.sha256:
                    said = f"{path} is damaged: its sha256 is not that of {CHECKSUMS}; nothing was sent"
                    raise ToolkitError(said, hint=self._mend())

    def unpacked(self, wheels: Iterable[Wheel]) -> int:
        """Bytes that wheels take when they are installed.

        Raises:
            ToolkitError: one is no wheel.
        """
        total = 0
        for wheel in wheels:
            with self._opened(wheel) as packed:
                total += sum(item.file_size for item in packed.infolist())
        return total

    def _best(self, hashes: set[str], ranks: Mapping[Tag, int]) -> Wheel | None:
        """Of the files that a requirement names, the one that suits a host best."""
        suiting: list[tuple[int, str]] = []
        for name, sha256 in self.sums.items():
            if sha256 in hashes and name.endswith(".whl"):
                try:
                    tags = parse_wheel_filename(name)[3]
                except InvalidWheelFilename:
                    continue
                suiting += [(ranks[tag], name) for tag in tags if tag in ranks]
        if not suiting:
            return None
        _, name = min(suiting)
        try:
            size = (self.folder / name).stat().st_size
        except OSError:
            return None
        return Wheel(name, self.sums[name], size)

    def _asks_for_cuda(self, torch: Wheel) -> bool:
        with self._opened(torch):
            return needs_cuda(self.folder / torch.name)

    def _opened(self, wheel: Wheel) -> zipfile.ZipFile:
        path = self.folder / wheel.name
        try:
            return zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ToolkitError(f"{path} is damaged: {error}; nothing was sent", hint=self._mend()) from None

    def _mend(self) -> str:
        return f"remove it, and fill the folder again: ddtoolkit wheelhouse --out {self.folder}"

    def _lacks(self, lock: Lock, missing: list[tuple[str, str]], target: Target) -> ConfigError:
        shown = ", ".join("==".join(pin) for pin in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        there = sorted(name for name in self.sums if name.endswith(".whl") and pin_of(name) in missing)
        others = f"; the lock names other files than {', '.join(there[:_SHOWN])}" if there else ""
        return ConfigError(
            f"{self.folder} has no {shown}{more} of the {lock.engine} engine's lock "
            f"for Python {target.python} on {target.machine}{others}",
            hint=f"ddtoolkit wheelhouse --out {self.folder} --engine {lock.engine} "
            f"--python {target.python} --machine {target.machine}",
        )


def open_house(folder: Path) -> House:
    """The folder by its checksums.

    Raises:
        ToolkitError: it has none.
    """
    return House(folder, checksums(folder))
