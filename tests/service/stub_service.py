"""A service on this machine made of the stub server, for tests of managers and transactions."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from toolkit.layout import Layout
from toolkit.release.experiment import forget_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.request import Acceptance
from toolkit.release.store import Release, content_digest, prepare_layout
from toolkit.service.leftovers import kill_all
from toolkit.service.supervision import read_supervision
from toolkit.service.unit import RestartPolicy, Unit

HERE = Path(__file__).parent
SERVER = HERE / "stub_server.py"
ACCEPTANCE = HERE / "stub_acceptance.py"


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections (ip(7), ip_local_port_range)."""
    while True:
        port = 10000 + secrets.randbelow(20000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class StubService:
    """Stages releases of the stub server and looks at what serves."""

    def __init__(self, root: Path, name: str = "stub") -> None:
        self.layout = Layout(root)
        self.name = name
        self.host = ServiceHost(self.layout, name)
        self.paths = self.host.paths
        self.port = free_port()
        self.stamp = 0
        prepare_layout(root, self.paths)

    def unit(self, release: str, *flags: str, **changes) -> Unit:
        argv = (sys.executable, "-S", str(SERVER), "--port", str(self.port), *flags)
        unit = Unit(
            name=self.name,
            release=release,
            description="stub",
            argv=argv,
            environment={},
            working_directory=str(self.paths.cache),
            host="127.0.0.1",
            port=self.port,
            cache=str(self.paths.cache),
            log=str(self.paths.log),
            load_timeout=10.0,
            stop_timeout=2.0,
            restart=RestartPolicy(delay=0.1, burst=3, interval=30.0),
        )
        return replace(unit, **changes)

    def stage(self, mark: str, *flags: str, profile: dict | None = None, **changes) -> Release:
        """A release whose server answers with `mark`."""
        profile = {"name": self.name, "mark": mark, "flags": list(flags)} | (profile or {})
        release_id = self.host.store.new_id(content_digest(profile, {}))
        unit = self.unit(release_id, "--mark", mark, *flags, **changes)
        return self.host.store.stage(release_id, profile=profile, unit=unit, manifest={"v": 1})

    def acceptance(self, **settings) -> Acceptance:
        url = f"http://127.0.0.1:{self.port}"
        limit = settings.pop("time_limit", 10.0)
        return Acceptance((sys.executable, "-S", str(ACCEPTANCE)), {"url": url, **settings}, limit)

    def mark(self) -> str | None:
        """What the server answers with now; None where nothing generates."""
        return generate(self.port)

    def wait_for_mark(self, mark: str | None, limit: float = 5.0) -> None:
        wait_until(lambda: self.mark() == mark, limit)

    def kill(self) -> None:
        """End everything that the service has started, however broken."""
        forget_experiment(self.paths)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.host.lock.transaction_running())
        found = read_supervision(self.paths.supervisor)
        if found is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if found.supervisor is not None:
                os.kill(found.supervisor.pid, signal.SIGKILL)
        kill_all(found.cookie, limit=5)


def generate(port: int) -> str | None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", b"{}", {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return str(json.load(answer)["text"])
    except OSError:
        return None


def wait_until(condition, limit: float = 5.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


ACCEPTS = Acceptance(("/bin/sh", "-c", 'echo "{}" > "$4"', "sh"), {}, 10.0)
REFUSES = Acceptance(
    ("/bin/sh", "-c", 'echo "{\\"reasons\\": [\\"too slow\\"]}" > "$4"; exit 1', "sh"), {}, 10.0
)
