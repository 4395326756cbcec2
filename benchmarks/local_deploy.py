"""What a user waits for on one machine: a first deploy of `local-cpu`, a second one, and `--help`.

python benchmarks/local_deploy.py --out benchmarks/local_deploy.json

Everything happens in a temporary home; the service is stopped afterwards. Wall-clock seconds of commands;
resident memory of the server after its acceptance, from /proc/PID/status.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("ddtoolkit")


def timed(*arguments: str, home: Path) -> tuple[float, str]:
    """Seconds and standard output of one command; a failing one ends the benchmark."""
    start = time.perf_counter()
    environment = os.environ | {"HOME": str(home)}
    run = subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if run.returncode:
        sys.exit(f"{' '.join(arguments)}: exit status {run.returncode}\n{run.stderr}")
    return round(seconds, 3), run.stdout


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def measure(home: Path) -> dict[str, Any]:
    port = ("--set", f"service.port={free_port()}")
    first, said = timed("deploy", "profile", "local-cpu", *port, "--json", "--yes", home=home)
    result = json.loads(said)
    try:
        (status,) = json.loads(timed("status", "--json", home=home)[1])
        second = [timed("deploy", "profile", "local-cpu", *port, home=home)[0] for _ in range(3)]
        plan = [timed("plan", "local-cpu", *port, home=home)[0] for _ in range(3)]
        memory = resident_mib(status["pid"])
    finally:
        timed("stop", home=home)
    report = result["acceptance"]
    return {
        "first_deploy_seconds": first,
        "steps_seconds": result["outcome"]["seconds"],
        "acceptance_seconds": report["seconds"],
        "acceptance_checks": {check["name"]: check["status"] for check in report["checks"]},
        "second_deploy_seconds": statistics.median(second),
        "plan_seconds": statistics.median(plan),
        "server_resident_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="ddtoolkit-benchmark-") as folder:
        home = Path(folder)
        timed("--help", home=home)
        help_seconds = [timed("--help", home=home)[0] for _ in range(9)]
        figures = measure(home)
    result = {
        "benchmark": "local_deploy",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": [round(value, 2) for value in load],
        },
        "help_seconds": {"median": statistics.median(help_seconds), "all": help_seconds},
        **figures,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
