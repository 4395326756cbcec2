"""Names of hosts, with a name server that is silent; each in namespaces of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.deadline import look_up

# The name server takes what is sent to it, and says nothing. glibc would wait 2 x 5 s for it.
SILENT = """
import json, socket, time
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
{imports}
begin = time.monotonic()
try:
    {asks}
except Exception as error:
    print(json.dumps([time.monotonic() - begin, type(error).__name__, str(error)]), flush=True)
"""
NAMESPACES = ("unshare", "--net", "--mount", "sh", "-ec")
SETUP = 'ip link set lo up; mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'


def why_not() -> str:
    """Why no such namespaces can be made here; "": they can."""
    if os.geteuid() != 0:
        return "mounting takes root"
    made = subprocess.run(
        [*NAMESPACES, SETUP, "sh", "/etc/hostname", "true"], capture_output=True, text=True, check=False
    )
    return made.stderr.strip()


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := why_not():
        pytest.skip(reason=why)
    path = tmp_path_factory.mktemp("names") / "resolv.conf"
    path.write_text("nameserver 127.0.0.1\n")
    return path


@pytest.mark.parametrize(
    ("imports", "asks", "told"),
    [
        pytest.param(
            "from toolkit.acceptance.line import Line",
            "Line(trust_env=False).get('http://server.example/health', seconds=0.5)",
            "ConnectError",
            id="a server that is tested",
        ),
        pytest.param(
            "from toolkit.weights.web import Web",
            "Web(silence=0.5).read('https://server.example/listing')",
            "ToolkitError",
            id="a publisher",
        ),
        pytest.param(
            "from toolkit.remote import ssh; from toolkit.remote.options import SshOptions; "
            "ssh.CONNECT_LIMIT = 0.5",
            "ssh.offered_key(SshOptions('h', 'server.example', 22, 'u', (), False, ()))",
            "UnreachableError",
            id="a host",
        ),
    ],
)
def test_a_silent_name_server_holds_nothing_longer_than_its_limit(
    resolver: Path, imports: str, asks: str, told: str
) -> None:
    program = SILENT.format(imports=imports, asks=asks)
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [*NAMESPACES, SETUP, "sh", str(resolver), sys.executable, "-c", program],
        capture_output=True, text=True, check=True, timeout=60, env=kept,
    )  # fmt: skip
    seconds, kind, message = json.loads(done.stdout)
    assert kind == told
    assert "server.example was not looked up within 0.5 s: the name server is silent" in message
    assert seconds < 3


def test_an_address_is_not_looked_up_and_an_unknown_name_is_left_to_the_connection() -> None:
    begin = time.monotonic()
    look_up("127.0.0.1", 0)
    look_up("::1", 0)
    look_up("localhost", 5)
    look_up("no..name", 5)
    assert time.monotonic() - begin < 5
