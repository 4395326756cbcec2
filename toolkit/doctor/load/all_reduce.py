"""All-reduces of NCCL, or of gloo on a CPU, a process a GPU: timed, and every sum compared.

Sent as text into the unit's sandbox. The request has `device`, `gpus` as for copies, `groups` (positions in
`gpus`; all groups work at the same time), `sizes` (bytes, smallest first), `iterations` (at most) and `limit`
(seconds).
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from toolkit.doctor.load.common import Request, bind, failure, load_torch, run, tell

_WARM = 3
_GRACE = 3.0
_POLL = 0.1
_SCAN = 1.0
_MODULUS = 1021  # sums of up to 16,000 ranks of it are exact in float32
_VIA = re.compile(r" via ([A-Z0-9]+)")
_WARNINGS = 4
_SAID = 300


class NcclLog:
    """What NCCL writes of the ways that it takes (`via P2P/CUMEM`) and of its faults (`NCCL WARN`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: tuple[dict[str, int], list[str]] = ({}, [])

    def scan(self) -> None:
        """Tell what is new."""
        ways: Counter[str] = Counter()
        warned: dict[str, None] = {}
        for path in sorted(self._folder.glob("nccl-*")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if match := _VIA.search(line):
                    ways[match[1]] += 1
                elif "NCCL WARN" in line:
                    warned[line.partition("NCCL WARN")[2].strip()[:_SAID]] = None
        found = (dict(ways), list(warned)[:_WARNINGS])
        if found != self._told:
            self._told = found
            tell(ways=found[0], warned=found[1])


def all_reduce(request: Request) -> None:
    """Start a process a GPU and wait for them."""
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-load-") as folder:
        ranks: dict[int, int] = {}  # process to position
        for group in request["groups"]:
            for position in group:
                pid = os.fork()
                if pid == 0:
                    _as_rank(request, group, position, folder)
                ranks[pid] = position
        log = NcclLog(Path(folder))
        failed = _await(ranks, [int(gpu["index"]) for gpu in request["gpus"]], log)
        log.scan()
    if failed:
        sys.exit(1)
    tell(done=True)


def _await(ranks: dict[int, int], indices: list[int], log: NcclLog) -> bool:
    """Wait for all ranks; once one failed, the others, which would wait for it, are ended."""
    failed, end, scanned = False, float("inf"), time.monotonic()
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        position = ranks.pop(pid, None)
        if position is not None and status and not failed:
            failed, end = True, time.monotonic() + _GRACE
            tell(ended={"gpu": indices[position], "status": os.waitstatus_to_exitcode(status)})
        elif time.monotonic() > end:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            end = float("inf")
        elif position is None:
            time.sleep(_POLL)
        if time.monotonic() > scanned + _SCAN:
            scanned = time.monotonic()
            log.scan()
    return failed


def _as_rank(request: Request, group: list[int], position: int, folder: str) -> None:
    """Be one rank, and end with it."""
    status = 1
    try:
        _rank(request, group, position, folder)
        status = 0
    except Exception as error:  # torch's own kinds are not known before it is loaded
        failure(int(request["gpus"][position]["index"]), error)
    finally:
        os._exit(status)


def _rank(request: Request, group: list[int], position: int, folder: str) -> None:
    rank, cuda = group.index(position), request["device"] == "cuda"
    os.environ |= {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM",
        "NCCL_DEBUG_FILE": f"{folder}/nccl-{position}", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    index = int(request["gpus"][position]["index"])
    bind(str(request["gpus"][position]["address"]))
    torch = load_torch(request)
    from torch import distributed

    device = torch.device("cuda", position) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if rank == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
        tell(software={"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl})
    names = ", ".join(str(request["gpus"][place]["index"]) for place in group)
    tell(at=f"joining GPU {names} by {'NCCL' if cuda else 'gloo'}")
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store-{group[0]}",
        rank=rank,
        world_size=len(group),
        timeout=datetime.timedelta(seconds=float(request["limit"])),
    )
    for size in request["sizes"]:
        tell(at=f"an all-reduce of {size} bytes on GPU {names}")
        wrong = _sum(torch, distributed, size, rank, len(group), device)
        count = max(_WARM, min(int(request["iterations"]), request["sizes"][-1] * 8 // size))
        seconds = _time(torch, distributed, size, count, device)
        wrong = max(wrong, _sum(torch, distributed, size, rank, len(group), device))
        tell(reduced={"gpu": index, "bytes": size, "seconds": seconds, "wrong": wrong})
    distributed.destroy_process_group()


def _time(torch: Any, distributed: Any, size: int, count: int, device: Any) -> float:
    """Seconds of one all-reduce, the mean of `count` that follow each other."""
    values = torch.zeros(size // 4, device=device)  # sums of it stay finite, however many
    begin = 0.0
    for turn in range(_WARM + count):
        if turn == _WARM:
            _settle(torch, device)
            begin = time.perf_counter()
        distributed.all_reduce(values)
    _settle(torch, device)
    return (time.perf_counter() - begin) / count


def _settle(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sum(torch: Any, distributed: Any, size: int, rank: int, ranks: int, device: Any) -> int:
    """Elements of an all-reduce that are not the sum: whole numbers, so that float32 is exact."""
    base = (torch.arange(size // 4, dtype=torch.int32, device=device) % _MODULUS).float()
    values = base + rank
    distributed.all_reduce(values)
    return int((values != base * ranks + ranks * (ranks - 1) // 2).sum())


def main(request: Request) -> None:
    """Do it."""
    run(all_reduce, request)
