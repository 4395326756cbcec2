"""One home with the bundled pair deployed by the real command; every test of the folder shares it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from toolkit.build.builder import checkpoint_marks
from toolkit.build.environment import materialise
from toolkit.build.for_profile import environment_of
from toolkit.files import json_bytes
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.release.experiment import Experiment, forget_experiment, write_experiment
from toolkit.release.locate import Deployed, layout_of, remember
from toolkit.release.store import Release, Store, content_digest
from toolkit.release.view import status
from toolkit.service.command import release_unit

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


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A home with a release that was accepted and is stopped."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    profile = tmp_path / "local.yaml"
    port = free_port()
    host = f"{{root: ~/service, python: {sys.executable}}}"
    profile.write_text(
        f"schema: 1\nname: local\nhost: {host}\nservice: {{port: {port}}}\n"
        "model: {target: {source: bundled}, drafter: {source: bundled}}\n"
    )
    resolved = load_profile(str(profile))
    layout = layout_of(resolved.profile)
    paths = layout.service("local")
    folders = ((layout.environments, 0o755), (layout.models, 0o755), (layout.logs, 0o750))
    for folder, mode in (*folders, (paths.releases, 0o755), (layout.state, 0o700), (paths.cache, 0o700)):
        folder.mkdir(parents=True)
        folder.chmod(mode)
    paths.state.mkdir(mode=0o700)
    environment = environment_of(resolved.profile, layout)
    built = {"digest": environment.digest, "versions": environment.versions, "source": environment.source}
    built |= {"path": str(materialise(environment, layout.environments)), "python": str(environment.python)}
    checkpoints = checkpoint_marks(resolved.profile, layout)
    manifest = {"environment": built, "checkpoints": checkpoints, "engine": {"tuned": {"threads": 2}}}
    store = Store(paths)
    name = store.new_id(content_digest(resolved.data, manifest))
    unit = release_unit(resolved.profile, manifest, store.path(name), layout)
    release = store.stage(name, profile=resolved.data, unit=unit, manifest=manifest)
    (release.path / "acceptance.json").write_bytes(json_bytes({"verdict": "accepted"}))
    store.switch(name)
    remember(Deployed("local", layout))
    yield Site(tmp_path, profile, port)
    forget_experiment(
        paths
    )  # its timer, which a command may have started, goes away, and starts nothing later


def on_trial(staged: Site) -> tuple[Release, Release]:
    """An experiment with another tree, which runs for ten minutes: its base and its release."""
    service = Deployed("local", layout_of(load_profile(str(staged.profile)).profile))
    paths, store = service.layout.service("local"), Store(service.layout.service("local"))
    base = store.current()
    assert base is not None
    profile = base.profile
    before, profile["speculative"]["budget"] = profile["speculative"]["budget"], 20
    name = store.new_id("f" * 64)
    tried = store.stage(
        name,
        profile=profile,
        unit=replace(base.unit, release=name),
        manifest=base.manifest,
        swapped=["speculative.budget"],
        deployed={"speculative.budget": before},
    )
    (tried.path / "acceptance.json").write_bytes(json_bytes({"verdict": "accepted", "mode": "experiment"}))
    store.switch(name)
    now = time.time()
    write_experiment(paths, Experiment(name, base.id, "a@b", now, now + 600, 5, None))
    return base, tried


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
