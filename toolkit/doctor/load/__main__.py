"""`python -m toolkit.doctor.load`: measures copies and all-reduces on this machine, without any profile.

    python -m toolkit.doctor.load --json                              # all GPUs, one group
    python -m toolkit.doctor.load --gpus 0,1,2,3 --group 2            # two groups of two
    python -m toolkit.doctor.load --device cpu --gpus 0,1 --mib 4     # a trial of two ranks without GPUs

It needs an interpreter with torch, its own by default. Exit status 1 where something did not come to its
end, or a byte or a sum is wrong; a figure is not judged. GPUs that others use are loaded, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from toolkit.doctor.load.confine import Way
from toolkit.doctor.load.measure import groups_of, measured
from toolkit.doctor.load.record import figures
from toolkit.doctor.load_result import Load
from toolkit.doctor.parse.smi import parse_smi
from toolkit.doctor.programs import ask

_SMALL = 8 << 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    args = _parser().parse_args(arguments)
    gpus = _gpus(args.device, args.gpus)
    if not gpus:
        print("nvidia-smi shows no such GPUs", file=sys.stderr)
        return 1
    indices = [int(gpu["index"]) for gpu in gpus]
    groups, whole = groups_of(indices, indices, args.group)
    most = args.mib << 20
    request = {
        "device": args.device,
        "bytes": most,
        "seconds": args.seconds,
        "sizes": sorted({size for size in (_SMALL, 1 << 20, 16 << 20) if size < most} | {most}),
        "iterations": args.iterations,
    }
    # In a unit with no other properties than its bounds, where there is systemd and root.
    way = Way(args.python, _environment(), (), None, args.limit, args.silence)
    load = Load(gpus=tuple(indices), groups=groups, whole=whole, device=args.device)
    load = measured(load, request, gpus, way)
    if args.json:
        print(json.dumps({**load.to_json(), "figures": figures(load)}, indent=2))
    else:
        _show(load)
    return 1 if _faults(load) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolkit.doctor.load", allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add(
        "--gpus",
        help="their numbers, as nvidia-smi counts, or of ranks on a CPU; default: all, or 0,1",
    )
    add("--group", type=int, default=1, help="GPUs that reduce together; default: all")
    add("--mib", type=int, default=64, help="MiB of a copy and of the largest all-reduce")
    add("--seconds", type=float, default=0.4, help="that a copy is repeated for")
    add("--iterations", type=int, default=200, help="of an all-reduce at most")
    add("--limit", type=float, default=300.0, help="seconds of the copies, and again of the all-reduces")
    add("--silence", type=float, default=90.0, help="seconds of one step")
    add("--python", default=sys.executable, help="interpreter with torch")
    add("--json", action="store_true")
    return parser


def _gpus(device: str, named: str | None) -> list[dict[str, Any]]:
    try:
        wanted = None if named is None else [int(text) for text in named.split(",")]
    except ValueError:
        return []
    if device == "cpu":
        return [{"index": index, "uuid": "", "address": f"cpu{index}"} for index in wanted or (0, 1)]
    smi = parse_smi(ask(["nvidia-smi", "-q", "-x"])["out"])
    found = {gpu.index: gpu for gpu in (() if smi is None else smi.gpus)}
    if not set(wanted or ()) <= found.keys():
        return []
    return [
        {"index": index, "uuid": found[index].uuid, "address": found[index].address}
        for index in (found if wanted is None else wanted)
    ]


def _environment() -> dict[str, str]:
    """NCCL's and CUDA's own variables, as they are set here."""
    kept = ("NCCL_", "CUDA_", "TORCH_", "LD_LIBRARY_PATH")
    return {name: value for name, value in os.environ.items() if name.startswith(kept)}


def _faults(load: Load) -> list[str]:
    """What went wrong, a line each."""
    found = [
        f"{what}: {run.end} {run.at} {run.said}".strip()
        for what, run in (("copies", load.copying), ("all-reduces", load.reducing))
        if run.end not in ("done", "skipped") or run.left
    ]
    found += [f"GPU {item.gpu}: {item.wrong} bytes came back wrong" for item in load.alone if item.wrong]
    found += [f"GPU {item.source} to {item.target}: {item.wrong} wrong" for item in load.peers if item.wrong]
    found += [f"GPU {item.gpu}: {item.wrong} sums are wrong" for item in load.reduced if item.wrong]
    return found


def _show(load: Load) -> None:
    for name, value in figures(load).items():
        text = f"{1e6 * value:.1f} us" if name.endswith(" s") else f"{value:.2f} GB/s"
        print(f"{name.removesuffix(' s')}: {text}")
    for link in load.links:
        print(f"GPU {link.gpu}: generation {link.generation} x{link.width} under load")
    if load.ways:
        print("NCCL's connections: " + ", ".join(f"{count} by {way}" for way, count in load.ways.items()))
    for line in _faults(load):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
