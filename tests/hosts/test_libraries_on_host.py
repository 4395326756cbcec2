"""Installing libraries on a host goes on without whoever asked for it; whoever asks next picks it up."""

import json
import shlex
import time
from pathlib import Path

import pytest

from tests.hosts.machines import Host
from toolkit.build.libraries.lock import lock_of

ROOT = Path(__file__).parents[2]
TOOL = "/srv/tool"
FOLDER = lock_of("embedded").folder_name
UNIT = f"ddtoolkit-{FOLDER}.service"
# Holds the folder's lock, as another installation would, until it is told to let go.
HOLD = f"""
import fcntl, os, pathlib, time
folder = pathlib.Path("/opt/ddtoolkit/envs"); folder.mkdir(parents=True, exist_ok=True)
file = open(folder / ".{FOLDER}.lock", "w"); fcntl.flock(file, fcntl.LOCK_EX)
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


def test_it_goes_on_without_its_watcher_and_the_next_one_sees_its_end(tool: Host) -> None:
    tool.root(["sh", "-c", f"setsid python3 -c {shlex.quote(HOLD)} >/dev/null 2>&1 &"])
    time.sleep(0.5)
    tool.root(["sh", "-c", f"setsid sh -c {shlex.quote(RUN)} >/dev/null 2>&1 & echo $! >/srv/watcher"])
    wait_for(tool, "active")
    first = tool.root(["systemctl", "show", "--property=InvocationID", "--value", UNIT]).stdout
    tool.root(["sh", "-c", "kill -9 $(cat /srv/watcher)"])
    assert tool.root(["systemctl", "is-active", UNIT]).stdout.strip() == "active"

    second = f"{{ sh -c {shlex.quote(RUN)} >/srv/said 2>&1; echo $? >/srv/status; }} >/dev/null 2>&1 &"
    tool.root(["sh", "-c", f"setsid sh -c {shlex.quote(second)}"])
    time.sleep(1.0)
    assert tool.root(["systemctl", "show", "--property=InvocationID", "--value", UNIT]).stdout == first
    tool.root(["touch", "/srv/let-go"])
    wait_for(tool, "inactive")
    time.sleep(0.5)
    lines = [json.loads(line) for line in tool.root(["cat", "/srv/said"]).stdout.splitlines()]
    assert any("another build of it is under way" in line.get("line", "") for line in lines)
    assert "no wheelhouse /srv/none on this host" in lines[-1]["error"]
    assert tool.root(["cat", "/srv/status"]).stdout.strip() == "1"
