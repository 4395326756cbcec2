"""Measurements with something wrong in them, and what has to be said of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.doctor import loads, profiles
from tests.doctor.recorded import Site, b300, pcie
from toolkit.doctor.load.record import figures
from toolkit.doctor.load_result import Left, Load, Run
from toolkit.doctor.wanted import Wanted

PCIE, B300 = profiles.profile(profiles.PCIE), profiles.profile(profiles.B300)
WELL, FAST = loads.healthy(pcie()), loads.healthy(b300())
AT = "copying from GPU 2 to GPU 5"
LARGE = 64 << 20


def some(items: tuple[Any, ...], place: int, **changes: Any) -> tuple[Any, ...]:
    """The items with one of them changed."""
    return (*items[:place], replace(items[place], **changes), *items[place + 1 :])


@dataclass(frozen=True)
class Fault:
    """What was measured, and what has to be said of it."""

    check: str
    level: str
    words: str
    load: Load
    site: Site | None = None
    profile: Wanted = PCIE


FAULTS = {
    "no interpreter": Fault(
        "pcie-bandwidth",
        "warn",
        "not measured: there is no /opt/x/bin/python",
        Load(why="there is no /opt/x/bin/python", fix="deploy it"),
    ),
    "a byte comes back wrong": Fault(
        "pcie-bandwidth",
        "fail",
        "GPU 3: 4 bytes came back other than they were sent",
        replace(WELL, alone=some(WELL.alone, 3, wrong=4)),
    ),
    "a byte is wrong with all at once": Fault(
        "pcie-bandwidth",
        "fail",
        "GPU 7: 1 bytes came back",
        replace(WELL, together=some(WELL.together, 7, wrong=1)),
    ),
    "a link that sticks": Fault(
        "pcie-bandwidth",
        "fail",
        "GPU 1: generation 2 under load",
        replace(WELL, links=some(WELL.links, 1, generation=2)),
    ),
    "a link that sticks beside NVLink": Fault(
        "pcie-bandwidth",
        "warn",
        "GPU 1: generation 4 under load",
        replace(FAST, links=some(FAST.links, 1, generation=4)),
        b300(),
        B300,
    ),
    "a link that loses lanes under load": Fault(
        "pcie-bandwidth",
        "fail",
        "GPU 0: x8 under load",
        replace(WELL, links=some(WELL.links, 0, width=8)),
    ),
    "no more than the generation before": Fault(
        "pcie-bandwidth",
        "warn",
        "GPU 2 alone: 55.8 GB/s to it, 30.9 from it",
        replace(WELL, alone=some(WELL.alone, 2, back=30.9)),
    ),
    "slower than before": Fault(
        "pcie-bandwidth",
        "warn",
        "copy to GPU 4: 40.0 GB/s, 56.0 GB/s before",
        replace(WELL, alone=some(WELL.alone, 4, to=40.0), earlier=figures(WELL)),
    ),
    "no record": Fault(
        "pcie-bandwidth",
        "warn",
        "No space left",
        replace(WELL, problem="/var/lib/x: No space left on device"),
    ),
    "the copies hang": Fault(
        "pcie-bandwidth",
        "fail",
        "it hangs while copying to GPU 1",
        replace(WELL, copying=Run("silent", "copying to GPU 1"), together=(), alone=WELL.alone[:1], peers=()),
    ),
    "torch has no CUDA": Fault(
        "pcie-bandwidth",
        "fail",
        "torch 2.13.0+cpu sees 0 of 8 GPUs while loading torch",
        replace(
            WELL,
            copying=Run("failed", "loading torch", "torch 2.13.0+cpu sees 0 of 8 GPUs", 1),
            together=(),
            alone=(),
            peers=(),
        ),
    ),
    "what cannot be killed": Fault(
        "pcie-bandwidth",
        "fail",
        "process 77 (python), in state D, does not end by SIGKILL while copying to GPU 1",
        replace(
            WELL,
            copying=Run("silent", "copying to GPU 1", left=(Left(77, "python", "D"),)),
            together=(),
            alone=(),
            peers=(),
            reducing=Run("skipped", said="a process of the copies cannot be killed"),
            reduced=(),
            ways={},
        ),
    ),
    "a peer reads what was not written": Fault(
        "p2p-bandwidth",
        "fail",
        "from GPU 0 to GPU 2 67108864 bytes arrived other than they were sent",
        replace(WELL, peers=some(WELL.peers, 1, wrong=LARGE)),
    ),
    "a peer that hangs": Fault(
        "p2p-bandwidth",
        "fail",
        f"it hangs while {AT}",
        replace(WELL, copying=Run("silent", AT), peers=WELL.peers[:9]),
    ),
    "a peer without direct access": Fault(
        "p2p-bandwidth",
        "warn",
        "GPU 3 has no direct access to GPU 0",
        replace(WELL, peers=some(WELL.peers, 2, access=False)),
    ),
    "NVLink that is none": Fault(
        "p2p-bandwidth",
        "warn",
        "from GPU 0 to GPU 2 52.0 GB/s: PCIe carries as much",
        replace(FAST, peers=some(FAST.peers, 1, rate=52.0)),
        b300(),
        B300,
    ),
    "peers slower than before": Fault(
        "p2p-bandwidth",
        "warn",
        "peer GPU 0 to 1: 12.0 GB/s, 39.0 GB/s before",
        replace(WELL, peers=some(WELL.peers, 0, rate=12.0), earlier=figures(WELL)),
    ),
    "the all-reduce hangs": Fault(
        "all-reduce",
        "fail",
        "it hangs while an all-reduce of 8192 bytes",
        replace(WELL, reducing=Run("silent", "an all-reduce of 8192 bytes on GPU 0, 1"), reduced=(), ways={}),
    ),
    "a rank crashes": Fault(
        "all-reduce",
        "fail",
        "with status 1 while joining; the rank of GPU 5 was the first to fail; NCCL: Cuda failure 700",
        replace(
            WELL, reducing=Run("ended", "joining", "", 1), reduced=(), faulty=5, warned=("Cuda failure 700",)
        ),
    ),
    "the measurement is killed": Fault(
        "all-reduce",
        "fail",
        "it ended with signal 11",
        replace(WELL, reducing=Run("ended", status=-11)),
    ),
    "a wrong sum": Fault(
        "all-reduce",
        "fail",
        "GPU 6: 12 sums of 8 KiB are wrong",
        replace(WELL, reduced=some(WELL.reduced, 18, wrong=12)),
    ),
    "NCCL through the host's memory": Fault(
        "all-reduce",
        "warn",
        "of NCCL's 16 connections 4 by SHM",
        replace(WELL, ways={"P2P": 12, "SHM": 4}),
    ),
    "all-reduces slower than before": Fault(
        "all-reduce",
        "warn",
        "GB/s before",
        replace(
            WELL,
            reduced=tuple(
                replace(item, seconds=item.seconds * (2 if item.bytes == LARGE else 1))
                for item in WELL.reduced
            ),
            earlier=figures(WELL),
        ),
    ),
    "a latency that rose": Fault(
        "all-reduce",
        "warn",
        "8192 bytes: 82 us, 41 us before",
        replace(
            WELL,
            reduced=tuple(
                replace(item, seconds=82e-6) if item.bytes == 8192 else item for item in WELL.reduced
            ),
            earlier=figures(WELL),
        ),
    ),
    "an all-reduce that NVLink does not carry": Fault(
        "all-reduce",
        "warn",
        "GB/s at 64 MiB on GPUs 0, 1, 2, 3, 4, 5, 6, 7: PCIe carries as much",
        replace(FAST, reduced=WELL.reduced),
        b300(),
        B300,
    ),
}
