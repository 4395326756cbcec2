"""One home with the bundled pair deployed by the real command; every test of the folder shares it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from toolkit.layout import Layout
from toolkit.release.view import status

PROGRAM = Path(sys.executable).with_name("ddtoolkit")


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Site:
    """A home folder in which services are deployed, and the profile for it."""

    home: Path
    profile: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DDTOOLKIT_", "XDG_"))}
        return kept | {"HOME": str(self.home), "COLUMNS": "200"}

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [PROGRAM, *arguments],
            env=self.environment,
            cwd=self.home,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        out, err = process.communicate(timeout=170)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def json(self, *arguments: str) -> Any:
        shown = self.run(*arguments, "--json")
        assert shown.stdout, shown.stderr
        return json.loads(shown.stdout)

    @property
    def status(self) -> dict[str, Any]:
        (shown,) = self.json("status")
        return shown

    def wait_for(self, condition: Any, seconds: float = 60.0) -> dict[str, Any]:
        """The first status that meets the condition; the command would take a hundred times as long."""
        layout, until = Layout(self.home / "service"), time.monotonic() + seconds
        while time.monotonic() < until:
            if condition(shown := status(layout, "local").to_json()):
                return shown
            time.sleep(0.1)
        raise AssertionError(f"never came: {shown}")

    def generate(self, **sampling: Any) -> dict[str, Any]:
        body = {"text": "def area(", "sampling_params": {"temperature": 0, "max_new_tokens": 16} | sampling}
        answer = httpx.post(f"http://127.0.0.1:{self.port}/generate", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """`local-cpu` on a port of its own, deployed and accepted."""
    home = tmp_path_factory.mktemp("home")
    port = free_port()
    profile = home / "local.yaml"
    profile.write_text(
        "schema: 1\nname: local\nhost: {root: ~/service}\n"
        "model: {target: {source: bundled}, drafter: {source: bundled}, served_name: small}\n"
        f"service: {{port: {port}, load_timeout: 60s, stop_timeout: 10s}}\n"
        "acceptance: {min_acceptance_length: 2.0, time_limit: 140s}\n"
    )
    made = Site(home, profile, port)
    try:
        shown = made.run("deploy", "profile", "local.yaml")
        assert shown.returncode == 0, shown.stderr
        yield made
    finally:
        made.run("stop", "--lock-wait", "100")
        left = _pids(home)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "a stopped service left processes behind"


def _pids(home: Path) -> list[int]:
    """Processes that carry this home in their arguments or environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(home).encode() in said and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
