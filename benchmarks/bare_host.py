"""From an empty host to the first token: seconds by stage, with wheels and weights at hand.

python -m benchmarks.bare_host --out benchmarks/bare_host.json

As root, in the checkout. Each repeat boots a fresh test host (Debian 12: sshd, systemd, Python, nothing of
the toolkit) and runs one command, `ddtoolkit deploy profile systemd-cpu --wheelhouse FOLDER`, which
provisions, brings the toolkit and the wheels over SSH, installs the locked libraries, builds, starts the
embedded engine with the bundled pair, and judges it. Nothing is kept between repeats but the folder here.

Stages up to `release` begin when the command tells of them; `plan` is what comes before, the doctor included,
without the time in which the toolkit's code came to the host (`tool`, by the times of its folder there).
`start`, `first_token` and `acceptance` are the transaction's own, by its journal on the host, whose clock is
this machine's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from benchmarks.fleet import NAME, ROOT, load, machine, moments
from tests.hosts import wheelhouse
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from tests.hosts.needs import why_not
from tests.hosts.network import Network

REPEATS = 3
DISK = "6G"
TOLD = ("provision", "wheels", "libraries", "build", "release")
TRANSACTION = {"start": "start_new", "first_token": "ready", "acceptance": "acceptance"}
STORE = "/var/lib/ddtoolkit/wheels"


def deploy(inventory: Path, folder: Path) -> tuple[float, dict[str, float], dict[str, Any]]:
    """When the command began, when it told of each step first, and what it gave."""
    command = [sys.executable, "-c", "from toolkit.cli.main import main; main()", "deploy", "profile", NAME]
    command += ["--wheelhouse", str(folder), "--yes", "--json", "-i", str(inventory)]
    begin, told, said = time.time(), dict[str, float](), list[str]()
    # What it gives may be longer than a pipe holds, and is read last.
    with (
        TemporaryFile(mode="w+") as shown,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True
        ) as running,
    ):
        assert running.stderr is not None
        for line in running.stderr:
            said.append(line)
            if found := re.match(r" *[\d.]+s +\S+ +(\w+) ", line):
                told.setdefault(found[1], time.time())
        if running.wait():
            raise SystemExit(f"deploy: status {running.returncode}\n{''.join(said)}")
        shown.seek(0)
        return begin, told, json.load(shown)


def once(network: Network, number: int, folder: Path, scratch: Path) -> tuple[dict[str, float], int]:
    """One deploy on a fresh host: seconds by stage, and bytes of the wheels that came."""
    host = Host(network, "bookworm", name=f"bare{number}", disk=DISK)
    try:
        inventory = scratch / f"{host.name}.yaml"
        write_inventory(inventory, [host], {host.name: {"ddtoolkit_profiles": [NAME]}})
        begin, told, said = deploy(inventory, folder)
        end = time.time()
        outcome = said["hosts"][host.name]["result"]["outcome"]
        if outcome["status"] != "committed":
            raise SystemExit(f"{host.name}: {outcome}")
        shown = host.root(["sh", "-c", "stat -c '%.W %.Z' /opt/ddtoolkit/tool/*/"]).stdout.split()
        tool = float(shown[1]) - float(shown[0])
        steps = moments(host)
        edges = [*(told[name] for name in TOLD), steps["start_new begin"]]
        stages = {"plan": edges[0] - begin - tool, "tool": tool}
        stages |= {name: edges[at + 1] - edges[at] for at, name in enumerate(TOLD)}
        for name, step in TRANSACTION.items():
            stages[name] = steps[f"{step} done"] - steps[f"{step} begin"]
        stages["to_first_token"] = steps["ready done"] - begin
        stages["whole_command"] = end - begin
        brought = sum(path.stat().st_size for path in host.path(STORE).glob("*.whl"))
        return {name: round(value, 3) for name, value in stages.items()}, brought
    finally:
        host.stop()


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range of measured values, with all of them."""
    return {
        "median": round(statistics.median(values), 3),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    if reason := why_not() or wheelhouse.why_not():
        raise SystemExit(reason)
    folder = wheelhouse.filled()
    about = machine() | {"load_before": load()}
    network = Network()
    try:
        with TemporaryDirectory(prefix="ddtoolkit-benchmark-") as scratch:
            runs = [once(network, number, folder, Path(scratch)) for number in range(1, args.repeats + 1)]
    finally:
        network.close()
    about["load_after"] = load()
    result = {
        "benchmark": "bare_host",
        "machine": about,
        "unit": "seconds of wall-clock time",
        "profile": NAME,
        "wheels_mb": round(runs[0][1] / 1e6, 1),
        "stages": {name: spread([stages[name] for stages, _ in runs]) for name in runs[0][0]},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
