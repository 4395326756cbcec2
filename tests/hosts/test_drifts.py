"""Drifts that hands make on a deployed host: each is found and told in full, and ended by the next deploy.

They are made in rounds of such that have subjects or words of their own: what is found in a round has to be
what was made in it, no more and no less. The deploy that follows a round ends it, by no more than it takes;
what no deploy ends it has to name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import MakeHost
from tests.hosts.drifting import NAME, ROUNDS, Case, Round
from tests.hosts.inventory import host_variables, write_inventory
from tests.hosts.machines import Host
from toolkit.fleet.connections import Connections
from toolkit.inventory.host import Host as KnownHost

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
KEY = "of-the-drifting-host-51aa"
# Packages of the test's own, in two versions, from a folder of the host.
PACKAGES = ("drift-removed", "drift-unheld", "drift-upgraded")


class Site:
    """The deployed host, and the rounds that were made on it."""

    def __init__(self, host: Host, inventory: Path, connections: Connections, pins: list[str]) -> None:
        self.host = host
        self.inventory = inventory
        self.connections = connections
        self.pins = pins
        self.found: dict[str, list[dict[str, str]]] = {}
        self.subjects: dict[str, dict[str, str]] = {}
        self.before: dict[str, dict[str, Any]] = {}

    def command(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        sets = ("--set", f"host.python={sys.executable}", "--set", "service.api_key.env=SERVER_KEY")
        pins = ("--set", f"host.packages=[{', '.join(self.pins)}]")
        # Speed is no subject of these tests, and a busy machine takes its time.
        slow = ("--set", "acceptance.time_limit=10m", "--set", "acceptance.speed_tolerance=0.95")
        program = Path(sys.executable).parent / "ddtoolkit"
        done = subprocess.run(
            [program, *arguments, NAME, *sets, *pins, *slow, "-i", self.inventory, "--json"],
            capture_output=True, text=True, check=False, timeout=800, cwd=ROOT,
            env=os.environ | {"SERVER_KEY": KEY, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        assert KEY not in done.stdout + done.stderr
        item: dict[str, Any] = json.loads(done.stdout)["hosts"][self.host.name]["result"]
        return {**item, "said": done.stderr}

    def deploy(self) -> dict[str, Any]:
        return self.command("deploy", "profile", "--yes")

    def drifts(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.connections.call(self.host.name, "drift", {"service": NAME})
        return found

    def status(self) -> dict[str, Any]:
        (item,) = self.connections.call(self.host.name, "status", {"service": NAME})
        return dict(item)

    def shell(self, text: str) -> str:
        if "{fill}" in text:
            self.host.fill_disk(leave=100 << 20)
        if "{empty}" in text:
            self.host.empty_disk()
        text = text.replace("{fill}", "true").replace("{empty}", "true").replace("{wait}", WAIT)
        return self.host.root(["sh", "-ec", text]).stdout.strip()

    def make(self, made: Round) -> list[dict[str, str]]:
        """What is found once the round's drifts are made, which happens once."""
        if made.name not in self.found:
            assert self.drifts() == []
            early = {case.name: self.shell(f"echo {case.subject}") for case in made.cases}
            for case in made.cases:
                self.shell(case.make)
            # A process's number is known only once it runs.
            late = {c.name: self.shell(f"echo {c.subject}") for c in made.cases if "MainPID" in c.subject}
            self.subjects[made.name] = early | late
            self.before[made.name] = self.status()
            self.found[made.name] = self.drifts()
        return self.found[made.name]


# Until the server answers; the agent asks it for its configuration.
WAIT = (
    "/usr/bin/python3 -c 'import http.client, time\n"
    "for _ in range(600):\n"
    "    try:\n"
    '        c = http.client.HTTPConnection("127.0.0.1", 30000, timeout=5); c.request("GET", "/health")\n'
    "        if c.getresponse().status == 200: break\n"
    "    except OSError: pass\n"
    "    time.sleep(0.1)'"
)


def repository(host: Host) -> list[str]:
    """Give the host a folder with packages in two versions as its only index; the pins of the older ones."""
    host.root(["mkdir", "/repository"])
    index = ""
    for package in PACKAGES:
        for version in ("1.0", "2.0"):
            control = f"Package: {package}\nVersion: {version}\nArchitecture: all\n"
            control += "Maintainer: test <test@example.org>\nDescription: test\n"
            script = (
                'mkdir -p /b/DEBIAN; cat > /b/DEBIAN/control; dpkg-deb -Zgzip -b /b "$0" >/dev/null; rm -r /b'
            )
            file = f"/repository/{package}_{version}.deb"
            host.root(["sh", "-ec", script, file], control)
            data = host.path(file).read_bytes()
            index += f"{control}Filename: .{file.removeprefix('/repository')}\nSize: {len(data)}\n"
            index += f"SHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    host.path("/repository/Packages").write_text(index)
    sources = "rm -rf /etc/apt/sources.list.d/*; cat > /etc/apt/sources.list; apt-get -qq update"
    host.root(["sh", "-ec", sources], SOURCES)
    return [f"{package}=1.0" for package in PACKAGES]


SOURCES = "deb [trusted=yes] file:/repository ./\n"


@pytest.fixture(scope="module")
def site(make_host: MakeHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    host = make_host("bookworm", name="ct200", engine=True, disk="4G")
    pins = repository(host)
    path = tmp_path_factory.mktemp("inventory") / "inventory.yaml"
    inventory = write_inventory(path, [host], {host.name: {"ddtoolkit_profiles": [NAME]}})
    known = KnownHost(host.name, host_variables(host), (NAME,))
    with Connections([known], python=sys.executable) as connections:
        made = Site(host, inventory, connections, pins)
        assert made.deploy()["outcome"]["status"] == "committed"
        yield made


@pytest.mark.parametrize(
    ("made", "case"),
    [
        pytest.param(made, case, id=f"{made.name}: {case.name if case else 'deploy'}")
        for made in ROUNDS
        for case in (*made.cases, None)
    ],
)
def test_drift(site: Site, made: Round, case: Case | None) -> None:
    found = site.make(made)
    if case is None:
        ends(site, made, found)
    else:
        is_told(case, site.subjects[made.name][case.name], found)


def is_told(case: Case, subject: str, found: list[dict[str, str]]) -> None:
    """It is among what was found, once, with all that a person needs."""
    told = [item for item in found if item["subject"] == subject and case.found in item["found"]]
    assert len(told) == 1, (subject, found)
    assert told[0]["kind"] == case.kind
    assert case.expected in told[0]["expected"]
    assert case.seen in told[0]["seen"]
    assert told[0]["fix"]
    assert KEY not in str(told)


def ends(site: Site, made: Round, found: list[dict[str, str]]) -> None:
    """Nothing else was found; the next deploy ends it, or names it, and does nothing that it need not do."""
    done = site.deploy()
    plan = done["plan"]
    if made.by_hand:
        lines = [
            re.sub(r" -i \S+ --limit \S+", "", line) for line in plan["by_hand"]
        ]  # which a host leaves out
        said = [line for item in found for line in lines if item["fix"] in line]
        assert len(said) >= sum(item["mend"] == "hand" for item in found) > 0
        site.shell(made.by_hand)
        site.deploy()
    left = site.drifts()
    assert len(found) == len(made.cases), json.dumps(found, indent=1)
    assert tuple(step["action"] for step in plan["steps"]) == made.steps
    assert "nothing to do" not in done["said"]
    assert left == []
    before, after = site.before[made.name], site.status()
    assert after["state"] == "running"
    assert (after["pid"] != before["pid"]) == made.restarts
    assert (after["release"] != before["release"]) == made.releases
    again = site.deploy()
    assert again["plan"]["empty"]
    assert "nothing to do" in again["said"]
