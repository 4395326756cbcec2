"""The whole job on a real host over SSH, with the real engine and the bundled pair."""

from __future__ import annotations

import json
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

Command = Callable[..., subprocess.CompletedProcess[str]]
NAME = "systemd-cpu"


@pytest.fixture(scope="module")
def served(make_host: MakeHost) -> Host:
    return make_host("bookworm", name="ct200", engine=True, disk="4G")


@pytest.fixture(scope="module")
def ddtoolkit(served: Host, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command with the host's inventory; it has to end with the status that is named."""
    inventory = tmp_path_factory.mktemp("inventory") / "inventory.yaml"
    write_inventory(inventory, [served], {"ct200": {"ddtoolkit_profiles": [NAME]}})

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).parent / "ddtoolkit", *arguments, "-i", inventory]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def deploy(ddtoolkit: Command, *more: str) -> dict[str, Any]:
    python = f"host.python={sys.executable}"
    done = ddtoolkit("deploy", "profile", NAME, "--set", python, "--yes", "--json", *more)
    result: dict[str, Any] = json.loads(done.stdout)["hosts"]["ct200"]["result"]
    return result


def test_a_host_is_deployed_changed_judged_and_brought_back(served: Host, ddtoolkit: Command) -> None:
    first = deploy(ddtoolkit)
    assert first["outcome"]["status"] == "committed"
    assert first["report"]["verdict"] == "accepted"
    assert served.root(["systemctl", "is-enabled", f"ddtoolkit-{NAME}"]).stdout.strip() == "enabled"

    again = deploy(ddtoolkit)
    assert again["plan"]["empty"]
    assert again["outcome"] is None

    swapped = ddtoolkit(
        "swap", NAME, "--set", "speculative.budget=7", "--set", "speculative.topk_cap=1",
        "--set", "speculative.debug_metrics=true", "--yes", "--json", status=5,
    )  # fmt: skip
    assert "speculative.budget: 16 -> 7" in swapped.stderr
    outcome = json.loads(swapped.stdout)["hosts"]["ct200"]["result"]["outcome"]
    assert outcome["status"] == "rolled_back"
    assert "acceptance_length" in outcome["message"]
    assert outcome["serving"] == first["release"]

    status = json.loads(ddtoolkit("status", NAME, "--json").stdout)["hosts"]["ct200"]["result"][0]
    assert (status["state"], status["release"]) == ("running", first["release"])

    history = json.loads(ddtoolkit("history", NAME, "--json").stdout)["hosts"]["ct200"]["result"]
    assert [entry["outcome"] for entry in history["entries"]] == ["committed", "rolled_back"]
    assert all(
        "key SHA256:" in entry["who"] and entry["who"].endswith("as deploy") for entry in history["entries"]
    )


def drifts(ddtoolkit: Command, status: int = 7) -> list[dict[str, str]]:
    shown = ddtoolkit("drift", NAME, "--set", f"host.python={sys.executable}", "--json", status=status)
    found: list[dict[str, str]] = json.loads(shown.stdout)["hosts"]["ct200"]["result"]
    return found


BASE = f"/opt/ddtoolkit/services/{NAME}"
UNIT = f"/etc/systemd/system/ddtoolkit-{NAME}.service"
DRIFTS = [
    ("chmod 0777 /opt/ddtoolkit/envs", "chmod 0755 /opt/ddtoolkit/envs", "mode 0777, not 0755"),
    (f"chown deploy {BASE}", f"chown root {BASE}", "belongs to deploy, not to root"),
    (f"chmod 0666 {UNIT}", f"chmod 0644 {UNIT}", "mode 0666, not 0644"),
    (f"cp {UNIT} /u; echo '# x' >> {UNIT}", f"cp /u {UNIT}", "is not the unit of the current release"),
    (
        f"mkdir {UNIT}.d; printf '[Service]\\nNice=5\\n' > {UNIT}.d/n.conf; systemctl daemon-reload",
        f"rm -r {UNIT}.d; systemctl daemon-reload",
        "a drop-in changes",
    ),
    (
        f"systemctl -q disable ddtoolkit-{NAME}",
        f"systemctl -q enable ddtoolkit-{NAME}",
        "is not started at boot",
    ),
    (
        "systemctl -q disable ddtoolkit-recover.service",
        "systemctl -q enable ddtoolkit-recover.service",
        "is not run at boot",
    ),
    (
        f"f=$(ls {BASE}/current/profile.json); cp $f /p; sed -i s/16/17/ $f",
        f"cp /p {BASE}/current/profile.json; chmod 0444 {BASE}/current/profile.json",
        "is not the one that was deployed",
    ),
    (f"chmod 0666 {BASE}/current/unit.json", f"chmod 0444 {BASE}/current/unit.json", "may write it"),
    (
        "echo >> $(ls /opt/ddtoolkit/envs/*/toolkit/layout.py)",
        "f=$(ls /opt/ddtoolkit/envs/*/toolkit/layout.py); head -c -1 $f > /l; cat /l > $f",
        "its files are not those that were built",
    ),
    (
        f"touch /var/cache/ddtoolkit/{NAME}/stranger",
        f"rm /var/cache/ddtoolkit/{NAME}/stranger",
        "belongs to root, not to ddtoolkit",
    ),
]


def test_drifts_that_hands_make_are_found(served: Host, ddtoolkit: Command) -> None:
    assert drifts(ddtoolkit, status=0) == []
    for make, mend, said in DRIFTS:
        served.root(["sh", "-c", make])
        found = [item["found"] for item in drifts(ddtoolkit)]
        assert any(said in item for item in found), (make, found)
        served.root(["sh", "-c", mend])
    left = [item for item in drifts(ddtoolkit) if "older than its unit file" not in item["found"]]
    assert all("not the one that was" not in item["found"] for item in left), left


def test_a_changed_key_of_the_profile_is_a_drift(ddtoolkit: Command) -> None:
    sets = ("--set", f"host.python={sys.executable}", "--set", "speculative.budget=32")
    shown = ddtoolkit("drift", NAME, *sets, "--json", status=7)
    found = {item["subject"]: item["found"] for item in json.loads(shown.stdout)["hosts"]["ct200"]["result"]}
    assert found["speculative.budget"] == "16 is deployed; the profile has 32"
