"""Two control machines and one real host: first deploys at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host

pytestmark = pytest.mark.timeout(300)

NAME = "systemd-cpu"
PROGRAM = Path(sys.executable).parent / "ddtoolkit"
# Speed is no subject of these tests, and a busy machine takes its time.
SETS = ("--set", f"host.python={sys.executable}", "--set", "acceptance.speed_tolerance=0.95")
DEPLOY = ("deploy", "profile", NAME, *SETS, "--yes", "--json")

Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def machine(make_host: MakeHost) -> Host:
    return make_host("bookworm", name="ct200", engine=True, disk="4G")


@pytest.fixture
def begin(machine: Host, tmp_path: Path) -> Begin:
    """Begins the command with the host's inventory."""
    path = write_inventory(tmp_path / "inventory.yaml", [machine], {"ct200": {"ddtoolkit_profiles": [NAME]}})

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [PROGRAM, *arguments, "-i", path]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return run


def ended(process: subprocess.Popen[str], status: int = 0) -> tuple[dict[str, Any], str]:
    """The result on the host, and what was said."""
    out, said = process.communicate(timeout=200)
    assert process.returncode == status, out + said
    return json.loads(out)["hosts"]["ct200"], said


def test_two_first_deploys_at_once_take_turns(machine: Host, begin: Begin) -> None:
    first = begin(*DEPLOY)
    assert first.stderr is not None
    said = ""
    while "build" not in said:  # nothing is staged yet, and the service's own lock is not taken
        said += first.stderr.readline()
    second = begin(*DEPLOY, "--set", "speculative.budget=7", "--lock-wait", "120")
    result, _ = ended(first)
    base = result["result"]["release"]
    result, said = ended(second)
    assert re.search(r"is locked by .* since .*: deploy profile systemd-cpu; waiting for it, 120 s at", said)
    assert "speculative.budget: 8 -> 7" in said
    outcome = result["result"]["outcome"]
    assert (outcome["status"], outcome["base"]) == ("committed", base)
    records = machine.path("/root/.local/state/ddtoolkit/services")
    assert [path.name for path in records.iterdir()] == [f"{NAME}.json"]
