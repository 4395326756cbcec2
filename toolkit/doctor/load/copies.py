"""Copies between host and GPUs and between GPUs, timed, and compared byte by byte with what was sent.

Sent as text into the unit's sandbox. The request has `device` (`cuda`, or `cpu`), `gpus` (`index`, `uuid` and
`address` of each), `bytes` of a copy and `seconds` that it is repeated for. Rates are 10^9 bytes a second.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from toolkit.doctor.load.common import GIGA, Request, bind, load_torch, run, tell

_BATCH = 4  # copies between two looks at the clock
_SMI_LIMIT = 15.0


class Side:
    """One GPU with its buffers: pinned `out` and `back` on the host, `here` and `other` on the GPU; uint8."""

    def __init__(self, torch: Any, request: Request, position: int, pattern: Any) -> None:
        cuda = request["device"] == "cuda"
        gpu = request["gpus"][position]
        self.index, self.address = int(gpu["index"]), str(gpu["address"])
        bind(self.address)
        self.device = torch.device("cuda", position) if cuda else torch.device("cpu")
        self._synchronize = torch.cuda.synchronize if cuda else None
        self.size = int(request["bytes"])
        self.out = torch.empty(self.size, dtype=torch.uint8, pin_memory=cuda)
        self.out.copy_(pattern.roll(position + 1))  # another one on each GPU
        self.back = torch.zeros(self.size, dtype=torch.uint8, pin_memory=cuda)
        self.here = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        self.other = torch.empty(self.size, dtype=torch.uint8, device=self.device)

    def settle(self) -> None:
        """Wait until everything on the GPU is done."""
        if self._synchronize is not None:
            self._synchronize(self.device)

    def send(self) -> None:
        """Copy from the host."""
        self.here.copy_(self.out, non_blocking=True)

    def fetch(self) -> None:
        """Copy to the host."""
        self.back.copy_(self.here, non_blocking=True)

    def read(self, held: Any) -> Any:
        """A buffer on the GPU as the host reads it, in `back`."""
        self.back.zero_()
        self.back.copy_(held)
        self.settle()
        return self.back

    def wrong(self, held: Any, expected: Any) -> int:
        """Bytes of a buffer on the GPU that are not what they should be, as the host reads them."""
        return int((self.read(held) != expected).sum())


def rate(copy: Callable[[], None], settle: Callable[[], None], size: int, seconds: float) -> float:
    """Median rate of a copy."""
    copy()
    settle()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(_BATCH):
            copy()
        settle()
        found.append(_BATCH * size / (time.perf_counter() - begin) / GIGA)
    return statistics.median(found)


def at_once(sides: list[Side], verb: str, seconds: float, meanwhile: Callable[[], None]) -> list[float]:
    """Rates of `send` or `fetch` on every GPU at the same time; `meanwhile` runs under that load."""
    ended, ready = threading.Event(), threading.Barrier(len(sides) + 1)
    rates = [0.0] * len(sides)

    def work(place: int) -> None:
        side = sides[place]
        bind(side.address)
        copy = getattr(side, verb)
        copy()
        side.settle()
        ready.wait()
        begin, copies = time.perf_counter(), 0
        while not copies or not ended.is_set():
            for _ in range(_BATCH):
                copy()
            side.settle()
            copies += _BATCH
        rates[place] = copies * side.size / (time.perf_counter() - begin) / GIGA

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(sides))]
    for thread in threads:
        thread.start()
    ready.wait()
    end = time.perf_counter() + seconds
    meanwhile()
    time.sleep(max(end - time.perf_counter(), 0.0))
    ended.set()
    for thread in threads:
        thread.join()
    return rates


def tell_links() -> None:
    """The driver's own account of its GPUs, taken while their links are under load."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-x"],  # noqa: S607  that of the unit's PATH is meant
            capture_output=True, text=True, errors="replace", timeout=_SMI_LIMIT, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
    tell(smi=done.stdout)


def copies(request: Request) -> None:
    """Each GPU alone, all at once, and each from each other."""
    torch = load_torch(request)
    cuda, seconds = request["device"] == "cuda", float(request["seconds"])
    tell(software={"torch": torch.__version__, "cuda": torch.version.cuda})
    random = torch.Generator().manual_seed(1)
    pattern = torch.randint(0, 256, (int(request["bytes"]),), dtype=torch.uint8, generator=random)
    sides = []
    for position, gpu in enumerate(request["gpus"]):
        tell(at=f"taking memory on GPU {gpu['index']}")
        sides.append(Side(torch, request, position, pattern))
    for side in sides:
        alone(side, seconds)
    tell(at="copying to all GPUs at once")
    to = at_once(sides, "send", seconds, tell_links if cuda else lambda: None)
    tell(at="copying from all GPUs at once")
    back = at_once(sides, "fetch", seconds, lambda: None)
    for place, side in enumerate(sides):
        wrong = int((side.back != side.out).sum())
        tell(together={"gpu": side.index, "to": to[place], "back": back[place], "wrong": wrong})
    for source in sides:
        sent = source.read(source.here).clone()  # what is there, whether or not it came as it was sent
        for target in sides:
            if source is not target:
                peer(torch, source, target, sent, seconds / 2, cuda=cuda)
    tell(done=True)


def alone(side: Side, seconds: float) -> None:
    """Copies of one GPU, with nothing else under way."""
    bind(side.address)
    tell(at=f"copying to GPU {side.index}")
    to = rate(side.send, side.settle, side.size, seconds)
    tell(at=f"copying from GPU {side.index}")
    back = rate(side.fetch, side.settle, side.size, seconds)
    tell(alone={"gpu": side.index, "to": to, "back": back, "wrong": side.wrong(side.here, side.out)})


def peer(torch: Any, source: Side, target: Side, sent: Any, seconds: float, *, cuda: bool) -> None:
    """Copies from one GPU's memory, which is `sent`, to another's, and what the host reads there then."""
    tell(at=f"copying from GPU {source.index} to GPU {target.index}")
    access = bool(torch.cuda.can_device_access_peer(target.device, source.device)) if cuda else True

    def copy() -> None:
        target.other.copy_(source.here, non_blocking=True)

    def settle() -> None:
        source.settle()
        target.settle()

    target.other.zero_()
    settle()
    copy()
    settle()
    first = target.wrong(target.other, sent)
    found = rate(copy, settle, source.size, seconds)
    wrong = max(first, target.wrong(target.other, sent))
    told = {"source": source.index, "target": target.index, "access": access}
    tell(peer={**told, "rate": found, "wrong": wrong})


def main(request: Request) -> None:
    """Do it."""
    run(copies, request)
