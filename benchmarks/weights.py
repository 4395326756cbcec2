"""What checkpoints cost: plans beside 590 GB, a transfer that breaks, one host against four.

python -m benchmarks.weights --out benchmarks/weights.json [--part large,breaks,fanout]

large: a real deploy on this machine (profile `local-cpu`) from a fetched checkpoint to which 64 sparse shards
were added, 590 GB in all; then `plan` and a deploy with nothing to change. The sparse shards' hashes are
placeholders, which is no shortcut: neither command reads them, and the script ends if one of them does.

breaks: 1 GB over HTTP from this machine, whole and with ten breaks, turn by turn; each copy is hashed then.

fanout: as root. Four test hosts, a publisher that gives a fixed rate to all together. The time until one host
has a checkpoint, until four have it with fan-out, and until four have it when each asks the publisher.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fleet import ROOT, fleet, load, machine, timed
from tests.hosts.inventory import write_inventory
from tests.hosts.publisher import HttpsPublisher
from tests.weights.checkpoints import safetensors, sums
from tests.weights.server import publishing
from toolkit.profile.source import parse
from toolkit.weights.arrive import Patience
from toolkit.weights.bring import Terms, bring
from toolkit.weights.origins import Origin
from toolkit.weights.pace import size_words
from toolkit.weights.store import Marker, mark_of, read_marker, write_marker

PORT = 30878
SHARDS, TOTAL = 64, 590_000_000_000
COMMAND = [sys.executable, "-c", "from toolkit.cli.main import main; main()"]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range of measured values, with all of them."""
    shown = [round(value, 3) for value in values]
    return {"median": round(statistics.median(shown), 3), "min": min(shown), "max": max(shown), "all": shown}


def large(turns: int) -> dict[str, Any]:
    """`plan` and a deploy with nothing to change, beside 590 GB."""
    with TemporaryDirectory(prefix="ddtoolkit-benchmark-") as name:
        folder = Path(name)
        for part in ("target", "drafter"):
            shutil.copytree(ROOT / "toolkit" / "ddtree" / "bundled" / part, folder / "published" / part)
            sums(folder / "published" / part)
        environment = {"XDG_STATE_HOME": str(folder / "state")}
        with publishing(folder / "published") as server:
            sets = ["--set", f"host.root={folder}/root", "--set", f"service.port={PORT}"]
            for part in ("target", "drafter"):
                sets += ["--set", f"model.{part}.source={server.url}/folder/{part}/"]
                sets += ["--set", f"model.{part}.revision=v1"]
            ran = [*COMMAND, "models", "add", "local-cpu", *sets]
            _good(timed(ran, environment))
            size = _grow(folder / "root" / "models" / "target@v1")
            first, _ = _good(timed([*COMMAND, "deploy", "profile", "local-cpu", *sets], environment))
        # The publisher is gone: what follows asks nobody.
        deploys, plans = [], []
        try:
            for _ in range(turns):
                seconds, done = _good(timed([*COMMAND, "plan", "local-cpu", *sets], environment))
                plans.append(seconds)
                assert "nothing to do" in done.stdout, done.stdout
                seconds, done = _good(timed([*COMMAND, "deploy", "profile", "local-cpu", *sets], environment))
                deploys.append(seconds)
                assert "nothing to do" in done.stderr, done.stderr
        finally:
            _good(timed([*COMMAND, "uninstall", "--yes"], environment))
    return {
        "bytes": size,
        "files": SHARDS,
        "first_deploy": first,
        "plan": spread(plans),
        "deploy_without_change": spread(deploys),
        "limit": 5.0,
        "holds": max(*plans, *deploys) <= 5.0,
    }


def _grow(folder: Path) -> int:
    """Add sparse shards to a complete checkpoint; its bytes then."""
    marker = read_marker(folder)
    assert marker is not None
    files = dict(marker.files)
    for number in range(1, SHARDS + 1):
        name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        (folder / name).write_bytes(safetensors(0))
        os.truncate(folder / name, TOTAL // SHARDS)
        files[name] = mark_of(folder / name, hashlib.sha256(name.encode()).hexdigest())
    made = Marker(marker.source, files, marker.revision, marker.arrived)
    write_marker(folder, made)
    return made.size


def _good(ran: tuple[float, subprocess.CompletedProcess[str]]) -> tuple[float, Any]:
    if ran[1].returncode != 0:
        raise SystemExit(f"{ran[1].args}: {ran[1].returncode}\n{ran[1].stdout}{ran[1].stderr}")
    return ran


def breaks(turns: int, size: int = 1_000_000_000) -> dict[str, Any]:
    """A transfer of four shards, whole and with ten breaks."""
    whole, broken = [], []
    with TemporaryDirectory(prefix="ddtoolkit-benchmark-") as name:
        folder = Path(name)
        (folder / "published").mkdir()
        names = [f"model-{number}.safetensors" for number in range(4)]
        for number, shard in enumerate(names):
            (folder / "published" / shard).write_bytes(safetensors(size // 4, number))
        sums(folder / "published")
        for _ in range(turns):
            for cuts, seconds in ((0, whole), (10, broken)):
                with publishing(folder / "published") as server:
                    server.faults.cut_after = size // 40
                    for number in range(cuts):
                        server.faults.cuts[names[number % 4]] += 1
                    seconds.append(_bring(f"{server.url}/folder/", folder / "models"))
                    assert server.faults.cuts.total() == 0
                for shard in names:
                    assert _same(folder / "models" / "folder@v1" / shard, folder / "published" / shard)
                shutil.rmtree(folder / "models")
    return {
        "bytes": size,
        "breaks": 10,
        "whole": spread(whole),
        "broken": spread(broken),
        "ratio": spread([two / one for one, two in zip(whole, broken, strict=True)]),
        "verified": True,
    }


def _bring(url: str, models: Path) -> float:
    begin = time.perf_counter()
    terms = Terms(models, patience=Patience(pause=0.1))
    bring(Origin(parse(url, "v1")), terms, lambda _: None)
    return time.perf_counter() - begin


def _same(one: Path, other: Path) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        return hashlib.file_digest(first, "sha256").digest() == hashlib.file_digest(second, "sha256").digest()


def fanout(turns: int, size: int = 160_000_000, rate: int = 8_000_000) -> dict[str, Any]:
    """One host, four hosts with fan-out, four hosts without."""
    found: dict[str, list[float]] = {"one": [], "four": [], "four_without": []}
    with fleet(["bookworm"] * 4) as hosts:
        published = hosts.folder / "published" / "large"
        published.mkdir(parents=True)
        for number in range(4):
            (published / f"model-{number}.safetensors").write_bytes(safetensors(size // 4, number))
        sums(published)
        names = list(hosts.hosts)
        network = next(iter(hosts.hosts.values())).network
        variables = {name: {"ddtoolkit_peer_address": host.ip} for name, host in hosts.hosts.items()}
        write_inventory(hosts.inventory, hosts.hosts.values(), variables)
        publisher = HttpsPublisher(network, hosts.folder / "published", hosts.folder, rate=rate)
        with contextlib.closing(publisher) as made:
            for host in hosts.hosts.values():
                made.trust_on(host)
            for _ in range(turns):
                for key, limit, more in (
                    ("one", names[0], ()),
                    ("four", None, ()),
                    ("four_without", None, ("--seed", "none")),
                ):
                    words = ("models", "add", f"{made.url}folder/large/", "--revision", "v1", *more)
                    seconds, _ = hosts.toolkit(*words, limit=limit)
                    found[key].append(seconds)
                    hosts.toolkit("models", "rm", "large@v1", "--yes", limit=limit)
    return {
        "bytes": size,
        "publisher_bytes_per_second": rate,
        **{key: spread(values) for key, values in found.items()},
        "four_over_one": spread([four / one for one, four in zip(found["one"], found["four"], strict=True)]),
        "without_over_one": spread(
            [four / one for one, four in zip(found["one"], found["four_without"], strict=True)]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="large,breaks,fanout")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    parts = {"large": large, "breaks": breaks, "fanout": fanout}
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.part.split(","):
        before = load()
        measured = parts[name](args.turns)
        result |= {"machine": machine(), name: {**measured, "load_before": before, "load_after": load()}}
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"{name}: {json.dumps(measured)}", f"({size_words(measured['bytes'])})", file=sys.stderr)


if __name__ == "__main__":
    main()
