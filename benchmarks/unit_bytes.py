"""10,000 random argument lists and environments through rendered units on real systemd, byte for byte.

python -m benchmarks.unit_bytes --out benchmarks/unit_bytes.json

As root, in the checkout. Each release boots a test host (tests/hosts); "differing" counts the cases whose
process got other arguments or another environment than the profile's; "seconds" is wall-clock time from the
first rendering to the last comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.hosts import unit_bytes
from tests.hosts.machines import Host
from tests.hosts.needs import why_not
from tests.hosts.network import Network
from tests.hosts.rootfs import RELEASES


def measure(network: Network, release: str, count: int, seed: int) -> dict[str, Any]:
    host = Host(network, release)
    start = time.perf_counter()
    found = list(unit_bytes.differences(host, unit_bytes.cases(count, seed)))
    seconds = time.perf_counter() - start
    for said in found[:3]:
        print(said, file=sys.stderr)
    version = host.root(["systemctl", "--version"]).stdout.splitlines()[0]
    host.stop()
    return {"release": release, "systemd": version, "differing": len(found), "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    load = os.getloadavg()
    with closing(Network()) as network:
        results = [measure(network, release, options.cases, options.seed) for release in RELEASES]
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    record = {
        "benchmark": "unit_bytes",
        "machine": {
            **machine,
            "python": platform.python_version(),
            "load_before": [round(x, 2) for x in load],
        },
        "cases": options.cases,
        "seed": options.seed,
        "results": results,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if any(result["differing"] for result in results):
        raise SystemExit("some cases differ")


if __name__ == "__main__":
    main()
