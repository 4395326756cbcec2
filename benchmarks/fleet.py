"""Test hosts that serve the bundled pair, for benchmarks of commands that work over SSH.

As root, in the checkout: the hosts are those of tests/hosts (systemd as PID 1, sshd, in namespaces).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from tests.hosts.needs import why_not
from tests.hosts.network import Network

ROOT = Path(__file__).resolve().parents[1]
NAME = "systemd-cpu"
JOURNAL = f"/var/lib/ddtoolkit/state/{NAME}/transaction/journal.jsonl"
SETS = ("--set", f"host.python={sys.executable}")
LIMIT = 3600


class Fleet:
    """Booted hosts and an inventory of them.

    Attributes:
        hosts: the hosts.
        inventory: path of the inventory.
        folder: for files of the run; removed with it.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.folder = folder
        variables = {host.name: {"ddtoolkit_profiles": [NAME]} for host in hosts}
        self.inventory = write_inventory(folder / "inventory.yaml", hosts, variables)

    def toolkit(self, *arguments: str, limit: str | None = None, ends: int = 0) -> tuple[float, Any]:
        """Wall-clock seconds of a command with `--json`, and what it gave; any other status ends the run."""
        command = [sys.executable, "-c", "from toolkit.cli.main import main; main()", *arguments, "--json"]
        command += ["-i", str(self.inventory), *(() if limit is None else ("--limit", limit))]
        seconds, done = timed(command)
        if done.returncode != ends:
            raise SystemExit(f"{' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return seconds, json.loads(done.stdout)

    def deploy(self, *more: str, batch: int, limit: str | None = None) -> tuple[float, Any]:
        """Deploy the profile, everywhere or on the hosts of a pattern."""
        words = ("deploy", "profile", NAME, *SETS, *more, "--yes", "--batch", str(batch))
        return self.toolkit(*words, limit=limit)


@contextmanager
def fleet(releases: Sequence[str], *, disk: str = "4G") -> Iterator[Fleet]:
    """One booted host for each Debian release named, until the end of the body."""
    if reason := why_not():
        raise SystemExit(reason)
    with TemporaryDirectory(prefix="ddtoolkit-benchmark-") as folder:
        network = Network()
        try:
            hosts = [
                Host(network, release, name=f"host{number}", with_engine=True, disk=disk)
                for number, release in enumerate(releases, 1)
            ]
            yield Fleet(hosts, Path(folder))
        finally:
            network.close()


def timed(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Wall-clock seconds of a command that is run in the checkout, and how it ended."""
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return round(time.perf_counter() - begin, 3), done


def moments(host: Host) -> dict[str, float]:
    """When each step of the host's last transaction began and ended, seconds since the epoch."""
    found = {}
    for line in host.path(JOURNAL).read_bytes().split(b"\0", 1)[0].splitlines():
        event = json.loads(line)
        if event["state"] != "progress":
            found[f"{event['step']} {event['state']}"] = float(event["time"])
    return found


def machine() -> dict[str, Any]:
    """This machine and the versions of what is measured."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    packages = ("ansible-core", "ansible-runner", "paramiko", "pydantic")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def load() -> list[float]:
    """The load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]
