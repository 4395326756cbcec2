"""A config-only deploy on eight hosts against the same on one, with latency on the way to them.

python -m benchmarks.eight_hosts --out benchmarks/eight_hosts.json

As root, in the checkout. Eight test hosts (Debian 12 and 13 in turn) get the profile `systemd-cpu`. Then all
that passes between this machine and a host's SSH takes 50 ms each way, so a round trip takes 100 ms, and a
deploy changes `service.keep_releases`: on one host, on eight that are restarted at the same time
(`--batch 8`), and on eight that are restarted one after the other (the default).

"own" is a deploy's wall-clock time without the time in which an engine started or was judged on any host:
without the union of the intervals from `start_new` to the end of `acceptance`, as the transactions' journals
have them. "own_without_stop" also leaves out the time in which an engine was being stopped. The hosts share
the processors of one machine, which real ones do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet import Fleet, fleet, load, machine, moments

HOSTS = 8
ONE_WAY = 0.05
# Eight engines that are judged at the same time on one machine take their time, and none is as fast as alone.
PATIENT = ("--set", "acceptance.time_limit=20m", "--set", "acceptance.speed_tolerance=0.95")
PATIENT = (*PATIENT, "--set", "service.load_timeout=110s", "--new-baseline")


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one interval."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def deploy(made: Fleet, kept: int, *, batch: int, limit: str | None = None) -> dict[str, Any]:
    """One config-only deploy, and what of it is the toolkit's own time."""
    change = ("--set", f"service.keep_releases={kept}")
    wall, said = made.deploy(*PATIENT, *change, batch=batch, limit=limit)
    names = list(said["hosts"])
    bad = {name: item for name, item in said["hosts"].items() if not item["result"]["outcome"]}
    if bad:
        raise SystemExit(f"nothing was deployed on {', '.join(bad)}")
    times = {name: moments(made.hosts[name]) for name in names}
    engine = [(item["start_new begin"], item["acceptance done"]) for item in times.values()]
    stopping = [(item["stop_old begin"], item["acceptance done"]) for item in times.values()]
    return {
        "hosts": len(names),
        "batch": batch,
        "wall": wall,
        "engine_starts_and_acceptance": round(covered(engine), 3),
        "own": round(wall - covered(engine), 3),
        "own_without_stop": round(wall - covered(stopping), 3),
    }


def measure(made: Fleet, turns: int) -> dict[str, list[dict[str, Any]]]:
    """Deploys in turn; each has another value, so that none finds nothing to do."""
    first = next(iter(made.hosts))
    values = iter(range(6, 1000))
    found: dict[str, list[dict[str, Any]]] = {"one": [], "eight_at_once": [], "eight_in_turn": []}
    for _ in range(turns):
        found["one"].append(deploy(made, next(values), batch=1, limit=first))
        found["eight_at_once"].append(deploy(made, next(values), batch=HOSTS))
        found["one"].append(deploy(made, next(values), batch=1, limit=first))
        found["eight_in_turn"].append(deploy(made, next(values), batch=1))
    return found


def ratios(found: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    """Eight hosts over one, medians."""
    middle = {name: statistics.median(item[key] for item in items) for name, items in found.items()}
    return {name: round(middle[name] / middle["one"], 2) for name in ("eight_at_once", "eight_in_turn")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    before = load()
    releases = [("bookworm", "trixie")[number % 2] for number in range(HOSTS)]
    with fleet(releases, disk="2G") as made:
        made.deploy(*PATIENT, batch=HOSTS)
        for host in made.hosts.values():
            host.delay(ONE_WAY)
        found = measure(made, options.turns)
    record = {
        "benchmark": "eight_hosts",
        "machine": {**machine(), "load_before": before, "load_after": load()},
        "unit": "seconds of wall-clock time; ratios without a unit",
        "latency_one_way": ONE_WAY,
        "deploys": found,
        "ratio_own": ratios(found, "own"),
        "ratio_own_without_stop": ratios(found, "own_without_stop"),
        "target": 3.0,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
