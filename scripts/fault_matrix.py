"""Every moment of deploy, swap and rollback, struck by every fault, on real hosts.

    python scripts/fault_matrix.py --out benchmarks/fault_matrix.json [--hosts 2] [--seed 1] [--only TEXT]

As root, where the test hosts can run (tests/hosts). Each change is run once to count its moments; then one
run a moment and fault, each from the same state, with the contract stub as the engine. A file that exists is
gone on with: what it has is not run again, except, with `--again`, what had a problem. `--only` takes what
holds the text in `scenario fault step moment`; `--limit` begins nothing after so many minutes.
`--table docs/faults.md` only writes the tables that the result gives.
Exit status 1 where a run has a problem.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.points import FAULTS, Moment
from tests.faults.results import Results, order
from tests.faults.table import update


def work(pipe: Connection, others: list[Connection], number: int, names: list[str]) -> None:
    """One host's worker: counts what it is asked to, then strikes what it is given."""
    for other in others:  # inherited: while one holds them, the other never hears that the parent is gone
        other.close()
    from tests.faults.bench import Bench, warm
    from tests.faults.scenarios import SCENARIOS, count, prepare
    from tests.faults.strike import strike
    from tests.hosts.machines import Host
    from tests.hosts.network import Network

    warnings.simplefilter("ignore")
    warm()
    network = Network()
    try:
        host = Host(network, "bookworm", name=f"ct{number}", with_engine=True, disk="250M")
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(host, Path(folder))
            prepare(bench)
            pipe.send({name: count(bench, SCENARIOS[name]) for name in names})
            while (job := pipe.recv()) is not None:
                name, moment, fault = job
                begin = time.monotonic()
                try:
                    run = strike(bench, SCENARIOS[name], moment, fault).to_json()
                except Exception:
                    run = {"scenario": name, "moment": moment.key, "step": moment.step, "fault": fault}
                    run["problems"] = [traceback.format_exc()[-1500:]]
                pipe.send({**run, "took": round(time.monotonic() - begin, 1)})
    finally:
        network.close()


def jobs(points: dict[str, list[Moment]], results: Results, options: argparse.Namespace) -> list[Any]:
    """What is left to do, the most telling first."""
    found = []
    for name, moments in points.items():
        for moment in moments:
            for fault in options.faults.split(","):
                if not moment.takes(fault):
                    continue
                text = f"{name} {fault} {moment.step} {moment.key}"
                if options.only in text and results.wants(name, moment, fault, again=options.again):
                    found.append((name, moment, fault))
    random.Random(options.seed).shuffle(found)
    found.sort(key=lambda job: -1 if results.has(job) else order(job))  # what had a problem first
    return found[:: options.every]


def drive(options: argparse.Namespace) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Give jobs to the workers; yields how many are done of how many, and each run."""
    from tests.faults.scenarios import SCENARIOS

    results = Results(options.out)
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    for number in range(options.hosts):
        mine, its = context.Pipe()
        names = list(SCENARIOS) if number == 0 else []
        ends.append(mine)
        context.Process(target=work, args=(its, ends, number, names), daemon=False).start()
        its.close()
    points: dict[str, list[Moment]] = ends[0].recv()
    results.points = points
    left = jobs(points, results, options)
    total, done = len(left), 0
    end = time.monotonic() + options.limit * 60
    for pipe in ends[1:]:
        pipe.recv()
    open_ends = []
    for pipe in ends:
        pipe.send(left.pop(0) if left else None)
        open_ends.append(pipe)
    while open_ends:
        for pipe in wait(open_ends):
            assert isinstance(pipe, Connection)  # noqa: S101 - nothing else is waited for
            try:
                run = pipe.recv()
            except EOFError:
                open_ends.remove(pipe)
                continue
            done += 1
            results.add(run)
            pipe.send(left.pop(0) if left and time.monotonic() < end else None)
            yield done, total, run
    results.write()


def main() -> int:
    """Command line; see the module's description."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--every", type=int, default=1, help="only each n-th of what there is to do")
    parser.add_argument("--limit", type=float, default=600.0, help="minutes")
    parser.add_argument("--table", type=Path, help="only write the tables of --out into this document")
    parser.add_argument("--again", action="store_true", help="also what had a problem")
    options = parser.parse_args()
    if options.table is not None:
        options.table.write_text(update(options.out, options.table), encoding="utf-8")
        return 0
    bad = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("preparing the hosts", total=None)
        for done, total, run in drive(options):
            what = f"{run['scenario']} {run['fault']} {run['step']}"
            progress.update(task, completed=done, total=total, description=what)
            if run["problems"]:
                bad += 1
                progress.console.print(
                    f"{what} {run['moment']}", *run["problems"], sep="\n    ", markup=False
                )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
