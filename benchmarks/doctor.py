"""The doctor on eight hosts at once against the doctor on one.

python -m benchmarks.doctor --out benchmarks/doctor.json

As root, in the checkout. Eight test hosts (Debian 12 and 13 in turn) answer as healthy machines with eight
RTX PRO 6000 do (tests/doctor), and are looked at for the profile of that machine, with all of its checks. The
first look brings the toolkit to each host; the others are measured in turns, one host, then eight. The hosts
share the processors of one machine with the command, which real ones do not; recorded programs answer at
once, and real ones take their time, on all hosts at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fleet import load, machine, timed
from tests.doctor import on_host
from tests.doctor.profiles import PCIE
from tests.doctor.recorded import pcie
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from tests.hosts.needs import why_not
from tests.hosts.network import Network

HOSTS = 8
COMMAND = (sys.executable, "-c", "from toolkit.cli.main import main; main()", "doctor", PCIE, "--json")
SETS = ("--set", "host.min_free_disk=256MiB", "--ignore-check", "python")


def look(inventory: Path, limit: str) -> dict[str, Any]:
    """One look: seconds on the clock, and processor seconds that the command itself took."""
    before = os.times()
    wall, done = timed([*COMMAND, *SETS, "-i", str(inventory), "--limit", limit])
    after = os.times()
    if done.returncode != 0:
        raise SystemExit(f"status {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    reports = [item["result"][0] for item in json.loads(done.stdout)["hosts"].values()]
    took = after.children_user + after.children_system - before.children_user - before.children_system
    checks = min(len(report["findings"]) - report["counts"]["skip"] for report in reports)
    return {
        "hosts": len(reports),
        "checks": checks,
        "wall": wall,
        "command": round(took, 2),
        "load": load()[0],
    }


def summary(looks: list[dict[str, Any]], hosts: int) -> dict[str, Any]:
    """Median and range of the looks at so many hosts."""
    walls = [item["wall"] for item in looks if item["hosts"] == hosts]
    return {"median": round(statistics.median(walls), 3), "min": min(walls), "max": max(walls)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    network = Network()
    try:
        hosts = [
            Host(network, ("bookworm", "trixie")[number % 2], name=f"host{number}", disk="1G")
            for number in range(HOSTS)
        ]
        for host in hosts:
            on_host.install(host)
            on_host.become(host, pcie())
        with TemporaryDirectory() as folder:
            names = {host.name: {"ddtoolkit_profiles": [PCIE]} for host in hosts}
            inventory = write_inventory(Path(folder) / "inventory.yaml", hosts, names)
            first = look(inventory, "all")
            looks = [look(inventory, limit) for _ in range(args.turns) for limit in ("host0", "all")]
    finally:
        network.close()
    found = {
        "machine": machine(),
        "first_look_at_eight": first,
        "one": summary(looks, 1),
        "eight": summary(looks, HOSTS),
        "looks": looks,
    }
    args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: found[key] for key in ("one", "eight")}))


if __name__ == "__main__":
    main()
