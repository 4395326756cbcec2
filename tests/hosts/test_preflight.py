"""The doctor before a deploy on a real host: a failure stops it before anything is touched."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host

pytestmark = pytest.mark.timeout(400)

NAME = "systemd-cpu"
PROGRAM = Path(sys.executable).parent / "ddtoolkit"
ROOT = Path(__file__).parents[2]
SETS = ("--set", f"host.python={sys.executable}", "--set", "acceptance.time_limit=10m",
        "--set", "acceptance.speed_tolerance=0.95")  # fmt: skip
SMALL = "MemTotal:         524288 kB\nMemFree:          262144 kB\n"

Deploy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def host(make_host: MakeHost) -> Host:
    return make_host("bookworm", name="ct200", engine=True, disk="4G")


@pytest.fixture(scope="module")
def too_small(host: Host) -> Iterator[None]:
    """The host has 512 MiB of memory, as far as its kernel tells."""
    host.path("/opt/meminfo").write_text(SMALL, encoding="utf-8")
    host.root(["mount", "--bind", "/opt/meminfo", "/proc/meminfo"])
    yield
    host.root(["umount", "/proc/meminfo"])


@pytest.fixture(scope="module")
def ddtoolkit(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    folder = tmp_path_factory.mktemp("preflight")
    inventory = write_inventory(folder / "hosts.yaml", [host], {host.name: {"ddtoolkit_profiles": [NAME]}})

    def run(*arguments: str, status: int) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [PROGRAM, *arguments, "-i", inventory, "--json"], capture_output=True, text=True, check=False,
            timeout=360, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def playbook(host: Host, ddtoolkit: Deploy, tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    folder = tmp_path_factory.mktemp("playbooks")
    inventory = write_inventory(folder / "hosts.yaml", [host], {host.name: {"ddtoolkit_profiles": [NAME]}})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ANSIBLE_PIPELINING": "True"}
    render = [PROGRAM, "render", NAME, "--format", "ansible", "--out", folder / "settings", *SETS]
    subprocess.run(render, check=True, timeout=60, capture_output=True, env=environment)

    def run(name: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM.with_name("ansible-playbook"), "-i", inventory, ROOT / "playbooks" / name]
        command += ["-e", f"ddtoolkit_settings_file={folder}/settings/settings.json", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=360, env=environment
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def deploy(ddtoolkit: Deploy, *more: str, status: int = 0) -> Any:
    done = ddtoolkit("deploy", "profile", NAME, *SETS, "--yes", *more, status=status)
    return json.loads(done.stdout)["hosts"]["ct200"], done.stderr


def test_a_failure_stops_the_deploy_before_anything_is_touched(
    host: Host, too_small: None, ddtoolkit: Deploy
) -> None:
    result, said = deploy(ddtoolkit, status=1)
    assert "ct200: ram: 512 MiB; expected 1.0 GiB at least; fix: " in result["error"]
    assert result["error"].startswith("ct200: nothing was touched, since the doctor found what would fail:")
    assert result["hint"] == "mend it, or deploy all the same with --ignore-check ram"
    assert result["hint"] in said
    assert host.root(["getent", "passwd", "ddtoolkit"], check=False).returncode == 2
    assert sorted(host.root(["ls", "/opt/ddtoolkit"]).stdout.split()) == ["tool"]


def test_a_playbook_is_stopped_by_the_same_words(host: Host, too_small: None, playbook: Deploy) -> None:
    said = playbook("site.yml", status=2).stdout
    assert "nothing was touched, since the doctor found what would fail:" in said
    assert "ram: 512 MiB; expected 1.0 GiB at least; fix: " in said
    assert "mend it, or deploy all the same with ddtoolkit_ignore_checks: ram" in said
    assert "what a deploy would do there:\\nprovision: " in said
    assert "PLAY [Provision]" not in said
    assert host.root(["getent", "passwd", "ddtoolkit"], check=False).returncode == 2


def test_a_playbook_passes_over_what_it_is_told_to(too_small: None, playbook: Deploy) -> None:
    ignored = json.dumps({"ddtoolkit_ignore_checks": ["ram"]})
    assert "fail: ram: 512 MiB" in playbook("doctor.yml", "-e", ignored).stdout
    assert "fail: ram: 512 MiB" in playbook("preflight.yml", "-e", ignored, "-v").stdout


def test_a_check_that_there_is_not_is_refused(too_small: None, ddtoolkit: Deploy) -> None:
    done = ddtoolkit("deploy", "profile", NAME, "--ignore-check", "rom", status=2)
    assert "there is no check 'rom'" in done.stderr
    assert "did you mean ram?" in done.stderr


def test_an_ignored_check_is_told_and_recorded(too_small: None, ddtoolkit: Deploy) -> None:
    result, said = deploy(ddtoolkit, "--ignore-check", "ram")
    assert result["result"]["outcome"]["status"] == "committed"
    assert "ignored: ram: 512 MiB; expected 1.0 GiB at least" in said
    history = json.loads(ddtoolkit("history", NAME, status=0).stdout)["hosts"]["ct200"]["result"]
    command = history["entries"][-1]["command"]
    assert command == f"deploy profile {NAME} {shlex.join(SETS)} --ignore-check ram"


def test_a_deploy_with_nothing_to_do_asks_no_doctor(too_small: None, ddtoolkit: Deploy) -> None:
    result, said = deploy(ddtoolkit)  # the fault is still there
    assert result["result"]["plan"]["empty"]
    assert "doctor" not in said


def test_a_playbook_with_nothing_to_do_asks_no_doctor(too_small: None, playbook: Deploy) -> None:
    assert "nothing to do" in playbook("preflight.yml", "-v").stdout


def test_what_serves_is_left_alone_by_a_deploy_that_is_stopped(
    host: Host, too_small: None, ddtoolkit: Deploy
) -> None:
    unit = ["systemctl", "show", "-p", "MainPID", "--value", f"ddtoolkit-{NAME}"]
    before = host.root(unit).stdout
    result, _ = deploy(ddtoolkit, "--set", "speculative.budget=7", status=1)
    assert "ram: 512 MiB" in result["error"]
    assert host.root(unit).stdout == before
    assert int(before) > 0
