"""What was measured: read from the lines of a measurement, which may be cut off or be no such lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from toolkit.doctor.parse.smi import parse_smi

# done: to its end; slow: over the limit; silent: nothing came for too long; failed: it said why; ended: it
# did not; flooded: it wrote more than any measurement does; unstarted; skipped: see `said`.
End = Literal["done", "slow", "silent", "failed", "ended", "flooded", "unstarted", "skipped"]


@dataclass(frozen=True, slots=True)
class Left:
    """A process that SIGKILL did not end."""

    pid: int
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class Run:
    """How a measurement ended.

    Attributes:
        end: how.
        at: the step that it was in.
        said: why it failed, or the end of what else it wrote.
        status: exit status, negative for a signal; None where it was killed or never ran.
        left: what could not be killed.
    """

    end: End
    at: str = ""
    said: str = ""
    status: int | None = None
    left: tuple[Left, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies to and from a GPU: 10^9 bytes a second, and bytes that came back wrong."""

    gpu: int
    to: float
    back: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Copies from one GPU to another; `access` is whether the driver lets them read each other's memory."""

    source: int
    target: int
    access: bool
    rate: float
    wrong: int


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """A GPU's PCIe link while it was under load."""

    gpu: int
    generation: int | None
    width: int | None


@dataclass(frozen=True, slots=True)
class Reduced:
    """All-reduces of one rank: of so many bytes, in seconds, and elements that were not the sum."""

    gpu: int
    bytes: int
    seconds: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Load:
    """Everything that was measured on a host.

    Attributes:
        why: why nothing was measured, "" where something was.
        fix: what to do about it.
        gpus: that were measured.
        busy: GPU to who is on it; these were left alone, unless they are in `gpus`, too.
        groups: GPUs that reduced together.
        whole: whether the groups are the profile's own.
        device: `cuda`, or `cpu` for a trial without GPUs.
        software: versions of torch, CUDA and NCCL.
        copying: how the copies ended.
        alone: copies of one GPU at a time.
        together: of all GPUs at once.
        links: under that load.
        peers: copies from GPU to GPU.
        reducing: how the all-reduces ended.
        reduced: of every rank and size.
        ways: transports that NCCL took, with the number of its connections (`P2P`, `SHM`, `NET`).
        warned: its warnings.
        faulty: the rank that ended first, by its GPU; None where none did.
        earlier: the best of earlier results on these GPUs, by name; see `record.figures`.
        record: the file that has them; "" where nothing is recorded.
        problem: why this result could not be recorded.
    """

    why: str = ""
    fix: str = ""
    gpus: tuple[int, ...] = ()
    busy: Mapping[int, str] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()
    whole: bool = True
    device: str = "cuda"
    software: Mapping[str, str] = field(default_factory=dict)
    copying: Run = Run("skipped")
    alone: tuple[Copy, ...] = ()
    together: tuple[Copy, ...] = ()
    links: tuple[LinkSeen, ...] = ()
    peers: tuple[Peer, ...] = ()
    reducing: Run = Run("skipped")
    reduced: tuple[Reduced, ...] = ()
    ways: Mapping[str, int] = field(default_factory=dict)
    warned: tuple[str, ...] = ()
    faulty: int | None = None
    earlier: Mapping[str, float] = field(default_factory=dict)
    record: str = ""
    problem: str = ""

    @property
    def beside(self) -> bool:
        """Whether others computed on these GPUs meanwhile: then no figure tells what they can do."""
        return not self.busy.keys().isdisjoint(self.gpus)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def read_copies(lines: Iterable[Mapping[str, Any]], addresses: Mapping[str, int]) -> dict[str, Any]:
    """Fields of `Load` from the lines of a measurement of copies.

    Args:
        lines: what it wrote.
        addresses: PCI address to the GPU that has it.
    """
    found: dict[str, Any] = {"software": {}, "alone": [], "together": [], "links": [], "peers": []}
    for line in lines:
        for name in ("alone", "together"):
            _add(found[name], line.get(name), _copy)
        _add(found["peers"], line.get("peer"), _peer)
        found["software"] |= _texts(line.get("software"))
        smi = parse_smi(line["smi"]) if isinstance(line.get("smi"), str) else None
        for gpu in () if smi is None else smi.gpus:
            if gpu.address in addresses:
                link = LinkSeen(addresses[gpu.address], gpu.link.generation, gpu.link.width)
                found["links"].append(link)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def read_reduced(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of `Load` from the lines of a measurement of all-reduces."""
    found: dict[str, Any] = {"software": {}, "reduced": [], "ways": {}, "warned": (), "faulty": None}
    for line in lines:
        _add(found["reduced"], line.get("reduced"), _one_reduced)
        found["software"] |= _texts(line.get("software"))
        counted: list[dict[str, int]] = []
        _add(counted, line.get("ways"), lambda ways: {str(way): int(_number(ways[way])) for way in ways})
        found["ways"] = counted[0] if counted else found["ways"]
        if isinstance(line.get("warned"), list):
            found["warned"] = tuple(str(text) for text in line["warned"])
        ended = line.get("ended") or line.get("failed")
        if isinstance(ended, dict) and isinstance(ended.get("gpu"), int) and found["faulty"] is None:
            found["faulty"] = ended["gpu"]
    return {**found, "reduced": tuple(found["reduced"])}


def _add(found: list[Any], value: Any, make: Callable[[Mapping[str, Any]], Any]) -> None:
    """Add what a line tells; leave out what is not as it should be."""
    if not isinstance(value, dict):
        return
    try:
        found.append(make(value))
    except (KeyError, TypeError, ValueError, OverflowError):
        return


def _copy(value: Mapping[str, Any]) -> Copy:
    return Copy(int(value["gpu"]), _number(value["to"]), _number(value["back"]), int(value["wrong"]))


def _peer(value: Mapping[str, Any]) -> Peer:
    pair = int(value["source"]), int(value["target"])
    return Peer(*pair, value["access"] is True, _number(value["rate"]), int(value["wrong"]))


def _one_reduced(value: Mapping[str, Any]) -> Reduced:
    seconds = _number(value["seconds"])
    return Reduced(int(value["gpu"]), int(value["bytes"]), seconds, int(value["wrong"]))


def _number(value: Any) -> float:
    """A number that is one: rates and times are neither negative nor infinite.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(value)
    return number


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(name): str(text) for name, text in value.items() if text is not None}
