"""The stub service of tests/service as a system unit of a test host, driven there by the toolkit's code."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.hosts.machines import Host

ROOT = Path(__file__).parents[2]
TOOL = "/opt/ddtoolkit/tool/test"
STUB = "/opt/stub"
PORT = 30000
USER = "ddtoolkit"
SERVICE_TESTS, RELEASE_TESTS = ROOT / "tests" / "service", ROOT / "tests" / "release"
HELPERS = (
    SERVICE_TESTS / "stub_server.py",
    SERVICE_TESTS / "stub_service.py",
    SERVICE_TESTS / "stub_acceptance.py",
    RELEASE_TESTS / "changes.py",
)
CLEAN = """
systemctl kill --signal=KILL 'ddtoolkit-stub*'
systemctl stop 'ddtoolkit-stub*'
cd /etc/systemd/system && rm -rf ddtoolkit-stub* */ddtoolkit-stub*
rm -rf /opt/ddtoolkit/services/stub /var/lib/ddtoolkit/state/stub /var/cache/ddtoolkit/stub
systemctl daemon-reload
systemctl reset-failed
"""
PRELUDE = f"""
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, "{STUB}")
from stub_service import ACCEPTS, REFUSES, StubService, wait_until
from changes import change, request
from toolkit.errors import ToolkitError
from toolkit.release.controller import begin, follow, hold, result
from toolkit.service.unit import RestartPolicy, SecretSource, Unit
import dataclasses
service = StubService(None)
service.port = {PORT}
host, store, paths = service.host, service.host.store, service.paths
def stage(mark, *flags, **changes):
    return service.stage(mark, *flags, **{{"manager": "systemd", "user": "{USER}", **changes}})
def current():
    return store.current()
manager = host.manager(service.unit("none", manager="systemd"))
def answer(value):
    print(json.dumps(value))
"""


def prepare(host: Host) -> None:
    """Put the toolkit and the stub into the host, as a deploy would, with the service's user."""
    host.push(ROOT / "toolkit", f"{TOOL}/toolkit")
    for helper in HELPERS:
        host.push(helper, f"{STUB}/{helper.name}")
    host.root(["useradd", "--system", "--no-create-home", "--home", "/var/cache/ddtoolkit", USER])


def call(host: Host, code: str, *arguments: str) -> Any:
    """Run `code` as root in the host; what it gave to `answer`."""
    program = ["env", f"PYTHONPATH={TOOL}", sys.executable, "-P", "-c", PRELUDE + code]
    done = host.root([*program, *arguments], timeout=90)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None


def enabled(host: Host, unit: str = "ddtoolkit-stub") -> bool:
    """Whether the unit is started at boot."""
    return host.root(["systemctl", "is-enabled", unit], check=False).stdout.strip() == "enabled"


def mark(host: Host, limit: float = 20.0) -> str | None:
    """What the server answers with, as soon as it does within `limit` seconds."""
    return call(
        host,
        f"""
end = time.monotonic() + {limit}
while service.mark() is None and time.monotonic() < end:
    time.sleep(0.1)
answer(service.mark())
""",
    )


def reset(host: Host) -> None:
    """Leave nothing of the service."""
    call(host, "from toolkit.release.experiment import forget_experiment; forget_experiment(paths)")
    host.root(["sh", "-c", CLEAN])
