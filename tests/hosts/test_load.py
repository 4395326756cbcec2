"""Load on a real host, in real units: two ranks on its CPU in place of GPUs, and programs that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doctor import on_host, profiles
from tests.doctor.recorded import pcie
from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from toolkit.doctor.ask import report_of
from toolkit.doctor.report import Report
from toolkit.doctor.request import examination, load_request
from toolkit.errors import ToolkitError
from toolkit.inventory.load import load_hosts
from toolkit.profile.loading import load_profile

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).parent / "ddtoolkit"
NAME = profiles.PCIE


def sets_of(gpus: int, *more: str) -> tuple[str, ...]:
    """The profile of the machine with eight GPUs, for fewer."""
    changed = (f"hardware.count={gpus}", f"parallelism.tp={2 if gpus == 2 else 1}", "model.target.shape=null")
    return ("host.min_free_disk=512MiB", "host.python_version=3.11", *changed, *more)


RECORD = f"/var/lib/ddtoolkit/state/{NAME}/load.json"
# On a CPU, and small: what is measured tells nothing of GPUs, but goes the whole way.
TRIAL = {"device": "cpu", "bytes": 1 << 20, "seconds": 0.02, "sizes": [8192, 1 << 20], "iterations": 5}
FREEZER = Path("/sys/fs/cgroup/freezer")
MISBEHAVES = "/opt/misbehaves"


@pytest.fixture(scope="module")
def host(make_host: MakeHost) -> Host:
    made = make_host("bookworm", name="ct200", engine=True)
    on_host.install(made)
    on_host.become(made, pcie(2))
    return made


@pytest.fixture(scope="module")
def inventory(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "inventory.yaml"
    return write_inventory(path, [host], {host.name: {"ddtoolkit_profiles": [NAME]}})


def loaded(inventory: Path, *, gpus: int = 2, **changes: Any) -> Report:
    """What the doctor finds with `changes` in what it loads the host with."""
    profile = load_profile(NAME, sets=sets_of(gpus, f"host.python={sys.executable}")).profile
    load = load_request(profile)
    assert load is not None
    asked = examination(profile, weights=False, load={**load, **TRIAL, **changes})
    return report_of(load_hosts([inventory])[0], asked)


def found(report: Report, *levels: str) -> dict[str, str]:
    """What the checks under load saw."""
    names = ("pcie-bandwidth", "p2p-bandwidth", "all-reduce")
    return {item.check: item.seen for item in report.findings if item.check in names and item.level in levels}


def units(host: Host) -> str:
    """The units of measurements that there are."""
    listing = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "ddtoolkit-load*"]
    return host.root(listing).stdout


def wait_for(condition: Callable[[], Any], limit: float = 30.0) -> Any:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError("it did not come")


@pytest.fixture
def program(host: Host) -> Iterator[Callable[[str], list[str]]]:
    """Puts a program onto the host that stands where the interpreter with torch is; nothing stays of it."""

    def make(text: str) -> list[str]:
        host.path(MISBEHAVES).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        host.path(MISBEHAVES).chmod(0o755)
        return [MISBEHAVES]

    yield make
    assert host.root(["pgrep", "-f", MISBEHAVES], check=False).stdout == ""
    assert units(host) == ""


def test_two_ranks_measure_in_the_services_own_sandbox(host: Host, inventory: Path) -> None:
    gpus = {str(card.index): card.uuid for card in pcie(2).cards}
    host.path(RECORD).parent.mkdir(parents=True)
    host.path(RECORD).write_text(json.dumps([{"gpus": gpus, "figures": {"copy to GPU 1": 1e4}}]))
    report = loaded(inventory)
    assert found(report, "fail", "skip") == {}
    (warned,) = found(report, "warn").values()
    assert warned.startswith("copy to GPU 1: ")
    assert warned.endswith(" GB/s, 10000.0 GB/s before")
    passed = found(report, "pass")
    assert passed["p2p-bandwidth"].endswith("on 2 ways, 2 of them direct; every byte arrived")
    assert passed["all-reduce"].startswith("GPUs 0, 1: ")
    assert passed["all-reduce"].endswith("every sum right")
    assert report.load is not None
    assert (report.load["copying"]["end"], report.load["reducing"]["end"]) == ("done", "done")
    before, entry = json.loads(host.path(RECORD).read_bytes())
    assert before["gpus"] == entry["gpus"] == gpus
    assert entry["figures"]["all-reduce 0,1, 1048576 bytes"] > 0
    assert host.path(RECORD).stat().st_mode & 0o777 == 0o600
    assert not list(host.path("/tmp").glob("*ddtoolkit-load*"))
    assert units(host) == ""


def test_a_program_that_hangs_is_ended_with_its_unit(inventory: Path, program: Any) -> None:
    text = """echo '{"at": "copying to GPU 1"}'; trap '' TERM; (setsid sleep 600 &); sleep 600"""
    begun = time.monotonic()
    failed = found(loaded(inventory, pythons=program(text), silence=4.0), "fail")
    assert time.monotonic() - begun < 60
    words = "it hangs while copying to GPU 1"
    assert failed == {"pcie-bandwidth": words, "all-reduce": words}


def test_a_unit_whose_doctor_was_killed_ends_by_itself(host: Host, inventory: Path, program: Any) -> None:
    pythons = program("trap '' TERM; while :; do sleep 0.2; done")

    def look() -> None:
        with contextlib.suppress(ToolkitError):  # it is killed
            loaded(inventory, pythons=pythons, limit=2.5, silence=60.0)

    looking = threading.Thread(target=look)
    looking.start()
    wait_for(lambda: units(host))
    pid = host.root(["pgrep", "-f", "-o", "toolkit.doctor"]).stdout.strip()
    host.root(["kill", "-KILL", pid])
    looking.join(30)
    assert units(host)
    wait_for(lambda: not units(host))


def test_the_command_tells_what_ended_badly_as_the_services_user(inventory: Path, program: Any) -> None:
    program("""head -c 5000 /dev/urandom; echo; echo "$(id -un) $NCCL_P2P_LEVEL" >&2; kill -SEGV $$""")
    done = doctor(inventory, "--load", "--json", "--set", f"host.python={MISBEHAVES}", status=1)
    (report,) = json.loads(done.stdout)["hosts"]["ct200"]["result"]
    failed = {item["check"]: item["seen"] for item in report["findings"] if item["level"] == "fail"}
    assert set(failed) == {"pcie-bandwidth", "all-reduce"}
    assert failed["pcie-bandwidth"].startswith("it ended with ")
    assert "nobody SYS" in failed["pcie-bandwidth"]
    assert report["load"]["device"] == "cuda"


def test_a_gpu_in_use_is_left_alone_and_the_rest_is_loaded(host: Host, inventory: Path, program: Any) -> None:
    pythons = program("""echo '{"done": true}'""")
    on_host.become(host, pcie(3).with_card(1, processes=((1, "C", "systemd", 81234),), used_mib=81240))
    try:
        report = loaded(inventory, gpus=3, pythons=pythons)
        assert "GPU 1 in use by process 1 (systemd) of root" in found(report, "skip")["pcie-bandwidth"]
        assert report.load is not None
        assert report.load["gpus"] == [0, 2]
        assert report.load["groups"] == [[0, 2]]
        words = ("--load", "--disruptive", "--set", f"host.python={MISBEHAVES}")
        done = doctor(inventory, *words, status=2, gpus=3)
        assert "ct200: GPU 1, in use by process 1 (systemd) of root" in done.stderr
        assert "next: add --yes" in done.stderr
    finally:
        on_host.become(host, pcie(2))


def test_what_sigkill_does_not_end_is_named_and_left(host: Host, inventory: Path, program: Any) -> None:
    """A frozen process of a version 1 control group is in state D as in a driver, whatever it is sent."""
    if not FREEZER.is_dir():
        pytest.skip(reason="no freezer of control groups version 1 here")
    pythons = program(f"exec {MISBEHAVES}-d")
    frozen = host.path(f"{MISBEHAVES}-d")
    talk = """print('{"at": "copying to GPU 0"}', flush=True)"""
    text = f"#!/usr/bin/python3\nimport time\nwhile True:\n    {talk}\n    time.sleep(0.1)\n"
    frozen.write_text(text, encoding="utf-8")  # it falls silent once it is frozen
    frozen.chmod(0o755)
    group = FREEZER / f"ddtoolkit-{os.getpid()}"
    group.mkdir()
    reports: list[Report] = []
    asking = threading.Thread(target=lambda: reports.append(loaded(inventory, pythons=pythons, silence=4.0)))
    asking.start()
    try:
        pid = wait_for(lambda: outside(f"{MISBEHAVES}-d"))
        # What became this program may have written something, too; two lines more, and one is whole.
        before = written(pid)
        wait_for(lambda: written(pid) > before + 60)
        (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        (group / "freezer.state").write_text("FROZEN", encoding="ascii")
        asking.join(60)
    finally:
        (group / "freezer.state").write_text("THAWED", encoding="ascii")
        wait_for(lambda: not (group / "cgroup.procs").read_text(encoding="ascii"))
        group.rmdir()
    (report,) = reports
    seen = found(report, "fail")["pcie-bandwidth"]
    assert "(misbehaves-d), in state D, does not end by SIGKILL while copying to GPU 0" in seen
    assert found(report, "skip")["all-reduce"] == "a process of the copies cannot be killed"
    wait_for(lambda: not units(host))


def written(pid: int) -> int:
    """Bytes that a process has written, to whatever it was (proc(5))."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def outside(words: str) -> int | None:
    """This machine's number of a process of a host."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and words.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return int(folder.name)
    return None


def doctor(inventory: Path, *arguments: str, status: int, gpus: int = 2) -> subprocess.CompletedProcess[str]:
    sets = [word for item in sets_of(gpus) for word in ("--set", item)]
    done = subprocess.run(
        [PROGRAM, "doctor", NAME, "-i", inventory, *sets, *arguments], capture_output=True, text=True,
        check=False, timeout=120, stdin=subprocess.DEVNULL, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done
