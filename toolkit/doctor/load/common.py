"""What both measurements share. Sent as text into the unit's sandbox: it needs torch alone.

One JSON object a line: `{"at": ...}` before each step, so that whoever kills it knows where it hung, then
what was found; `{"done": true}` at the end, or `{"failed": ...}` with status 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIGA = 1e9
_SAID = 600

Request = dict[str, Any]


def tell(**value: Any) -> None:
    """Write one line in one piece; end where nobody reads any more."""
    data = json.dumps(value).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        os._exit(1)


def failure(gpu: int | None, error: Exception) -> None:
    """Tell why it failed; `gpu` is the one of the rank that did."""
    tell(failed={"gpu": gpu, "said": f"{type(error).__name__}: {error}"[:_SAID]})


def load_torch(request: Request) -> Any:
    """Import torch with the GPUs that are asked for, in this order.

    Raises:
        ImportError: there is none.
        RuntimeError: it does not see them all.
    """
    tell(at="loading torch")
    if request["device"] == "cuda":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu["uuid"] for gpu in request["gpus"])
    import torch

    if request["device"] != "cuda":
        torch.set_num_threads(1)
    elif torch.cuda.device_count() < len(request["gpus"]):
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} of {len(request['gpus'])} GPUs"
        raise RuntimeError(seen)
    return torch


def bind(address: str) -> None:
    """Run this thread on the CPUs beside a GPU, so that its pinned memory lies there."""
    cpus: set[int] = set()
    try:
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text(encoding="ascii")
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError):
        return  # a virtual machine does not tell, a container may not grant it


def run(work: Callable[[Request], None], request: Request) -> None:
    """Do what is asked for; what goes wrong is told, and ends with status 1."""
    try:
        work(request)
    except (ImportError, RuntimeError, OSError, ValueError) as error:
        failure(None, error)
        sys.exit(1)
