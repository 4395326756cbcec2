"""The GPUs of `gpus.toml`: what a profile need not repeat, and what a host is judged against."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

_FILE = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of GPU.

    Attributes:
        names: as nvidia-smi prints them; the same chip sold in several forms has several.
        compute_capability: "major.minor".
        memory_mib: memory.total of nvidia-smi, MiB; the driver keeps less than 1% of it for itself.
        bandwidth_gb_s: of the memory, 10^9 bytes a second.
        multiprocessors: streaming multiprocessors in use.
        shared_memory_per_block: bytes that a thread block may ask for.
        interconnect: how the GPUs of one host are joined.
        nvlink_gb_s: both directions together, 10^9 bytes a second; 0 without NVLink.
        nvlinks: links of one GPU, the NV18 of `nvidia-smi topo -m`; 0 without NVLink.
        pcie_generation: of its own link under load; idle links fall to generation 1.
        pcie_width: lanes.
        sources: value's name to how it is known: "measured: ...", "sourced: ..." or "unverified: ...".
    """

    names: tuple[str, ...]
    compute_capability: str
    memory_mib: int
    bandwidth_gb_s: int
    multiprocessors: int
    shared_memory_per_block: int
    interconnect: Literal["pcie", "nvlink"]
    nvlink_gb_s: int
    nvlinks: int
    pcie_generation: int
    pcie_width: int
    sources: Mapping[str, str]

    @property
    def memory_gib(self) -> float:
        """Memory in GiB, 2^30 bytes."""
        return self.memory_mib / 1024

    @property
    def architecture(self) -> str:
        """The name that compilers use: `sm_120` for compute capability 12.0."""
        return f"sm_{self.compute_capability.replace('.', '')}"


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue, in its order."""
    return tuple(Gpu(**{**entry, "names": tuple(entry["names"])}) for entry in _data()["gpu"])


def oldest_driver(cuda: str) -> str | None:
    """The oldest Linux driver that runs programs of a CUDA version ("13.0"); None if it is not known."""
    return next((entry["driver"] for entry in _data()["cuda"] if entry["version"] == cuda), None)


def version_of(driver: str) -> tuple[int, ...]:
    """A driver's version for comparing: (580, 65, 6) of "580.65.06"."""
    return tuple(int(part) for part in driver.split("."))


@cache
def _data() -> dict[str, Any]:
    with _FILE.open("rb") as file:
        return tomllib.load(file)


def find_gpu(name: str) -> Gpu | None:
    """The GPU that nvidia-smi prints as `name`; None if the catalogue has none."""
    return next((gpu for gpu in gpus() if name in gpu.names), None)


def nearest_name(name: str) -> str | None:
    """The known name most like `name`, for messages; None if none is near."""
    known = {other.lower(): other for gpu in gpus() for other in gpu.names}
    within = [other for lower, other in known.items() if name.lower() in lower]
    if name and within:
        return within[0]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return known[close[0]] if close else None
