"""Installing libraries on a host goes on without whoever asked for it, and again after whatever struck it."""

import contextlib
import json
import re
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.build.wheels import lock_for, make_wheel
from tests.hosts.machines import Host
from toolkit.build.lock import lock_of

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = "/opt/ddtoolkit/envs"
TOOL = "/srv/tool"
FOLDER = lock_of("embedded").folder_name
UNIT = f"ddtoolkit-{FOLDER}.service"
# Holds the folder's lock, as another installation would, until it is told to let go.
HOLD = f"""
import fcntl, os, pathlib, time
folder = pathlib.Path("/opt/ddtoolkit/envs"); folder.mkdir(parents=True, exist_ok=True)
file = open(folder / ".{FOLDER}.lock", "w"); fcntl.flock(file, fcntl.LOCK_EX)
pathlib.Path("/srv/held").touch()
while not os.path.exists("/srv/let-go"): time.sleep(0.05)
"""
RUN = f"PYTHONPATH={TOOL} exec python3 -P -m toolkit.build.libraries embedded --wheelhouse /srv/none"


@pytest.fixture(scope="module")
def tool(host: Host) -> Host:
    host.push(ROOT / "toolkit", f"{TOOL}/toolkit")
    return host


def wait_for(host: Host, state: str) -> None:
    end = time.monotonic() + 30
    while host.root(["systemctl", "is-active", UNIT], check=False).stdout.strip() != state:
        assert time.monotonic() < end, f"{UNIT} never was {state}"
        time.sleep(0.2)


def wait_until(host: Host, test: str) -> None:
    """Until a shell's test on the host is true."""
    end = time.monotonic() + 30
    while host.root(["sh", "-c", test], check=False).returncode != 0:
        assert time.monotonic() < end, f"it never came to: {test}"
        time.sleep(0.1)


def test_it_goes_on_without_its_watcher_and_the_next_one_sees_its_end(tool: Host) -> None:
    tool.root(["sh", "-c", f"setsid python3 -c {shlex.quote(HOLD)} >/dev/null 2>&1 &"])
    wait_until(tool, "test -e /srv/held")
    tool.root(["sh", "-c", f"setsid sh -c {shlex.quote(RUN)} >/dev/null 2>&1 & echo $! >/srv/watcher"])
    wait_for(tool, "active")
    first = tool.root(["systemctl", "show", "--property=InvocationID", "--value", UNIT]).stdout
    tool.root(["sh", "-c", "kill -9 $(cat /srv/watcher)"])
    assert tool.root(["systemctl", "is-active", UNIT]).stdout.strip() == "active"

    second = f"{{ sh -c {shlex.quote(RUN)} >/srv/said 2>&1; echo $? >/srv/status; }} >/dev/null 2>&1 &"
    tool.root(["sh", "-c", f"setsid sh -c {shlex.quote(second)}"])
    wait_until(tool, "grep -q 'under way' /srv/said")
    assert tool.root(["systemctl", "show", "--property=InvocationID", "--value", UNIT]).stdout == first
    tool.root(["touch", "/srv/let-go"])
    wait_for(tool, "inactive")
    wait_until(tool, "test -s /srv/status")
    lines = [json.loads(line) for line in tool.root(["cat", "/srv/said"]).stdout.splitlines()]
    assert any("another build of it is under way" in line.get("line", "") for line in lines)
    assert "no wheelhouse /srv/none on this host" in lines[-1]["error"]
    assert tool.root(["cat", "/srv/status"]).stdout.strip() == "1"


class Tiny:
    """The toolkit on a host, with a lock that is installed in seconds, and a wheelhouse there."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.house = folder / "house"
        self.house.mkdir()
        wheels = [make_wheel(self.house, name) for name in ("torch", "plain")]
        self.lock = lock_for(*wheels)
        self.folder = f"{ENVIRONMENTS}/{self.lock.folder_name}"
        self.unit = f"ddtoolkit-{self.lock.folder_name}.service"
        host.push(ROOT / "toolkit", "/srv/tiny/toolkit")
        host.path("/srv/tiny/toolkit/build/locks/embedded.txt").write_text(self.lock.text)
        host.push(self.house, "/srv/house")

    def command(self) -> list[str]:
        words = ["python3", "-P", "-m", "toolkit.build.libraries", "embedded", "--wheelhouse", "/srv/house"]
        return ["env", "PYTHONPATH=/srv/tiny", "LC_ALL=C.UTF-8", *words]

    def install(self) -> dict[str, Any]:
        """What an installation ends with."""
        return json.loads(self.host.root(self.command(), check=False).stdout.splitlines()[-1])

    @contextlib.contextmanager
    def under_way(self) -> Iterator[list[dict[str, Any]]]:
        """An installation that has begun to make its environment; in the end what it told, if it did."""
        ended: list[dict[str, Any]] = []
        # What a run before left would look like the beginning.
        self.host.root(["rm", "-rf", self.folder, f"{ENVIRONMENTS}/.{self.lock.folder_name}.new"])

        def run() -> None:
            with contextlib.suppress(RuntimeError, json.JSONDecodeError, IndexError):
                ended.append(self.install())

        thread = threading.Thread(target=run)
        thread.start()
        end = time.monotonic() + 30
        while not self.host.path(f"{ENVIRONMENTS}/.{self.lock.folder_name}.new/bin").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        yield ended
        thread.join(60)

    def complete(self) -> bool:
        return self.host.path(f"{self.folder}/libraries.json").exists()


@pytest.fixture(scope="module")
def tiny(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(host, tmp_path_factory.mktemp("tiny"))


def test_a_damaged_wheel_is_refused_by_name_and_nothing_is_installed(tiny: Tiny) -> None:
    wheel = tiny.host.path("/srv/house/plain-1.0-py3-none-any.whl")
    whole = wheel.read_bytes()
    make_wheel(wheel.parent, "plain", requires="Summary: another\n")
    said = tiny.install()
    wheel.write_bytes(whole)
    assert "plain==1.0 from the wheelhouse /srv/house is not the file that the lock names" in said["error"]
    assert not tiny.host.path(tiny.folder).exists()


def test_a_full_disk_is_told_and_nothing_is_left(tiny: Tiny) -> None:
    tiny.host.fill_disk(leave=5 << 20)
    try:
        said = tiny.install()
    finally:
        tiny.host.empty_disk()
    assert re.search(r"No space left on device \(\d+ MiB are free\)", said["error"])
    assert "run the same command again" in said["hint"]
    assert not tiny.host.path(tiny.folder).exists()


def test_a_killed_build_is_told_and_the_next_run_does_it(tiny: Tiny) -> None:
    with tiny.under_way() as ended:
        tiny.host.root(["systemctl", "kill", "--signal=KILL", tiny.unit])
    assert f"{tiny.unit} ended without a result" in ended[0]["error"]
    assert not tiny.complete()


def test_a_power_cut_in_the_middle_costs_no_more_than_a_new_run(tiny: Tiny) -> None:
    with tiny.under_way() as ended:
        tiny.host.power_cut()
    assert not any("changed" in item for item in ended)  # its watcher died with it, or saw it die
    assert not tiny.complete()
    assert tiny.install() == {"changed": True, "folder": tiny.folder}
    assert tiny.install() == {"changed": False, "folder": tiny.folder}
    tiny.host.root([f"{tiny.folder}/bin/python", "-c", "import plain, torch"])
