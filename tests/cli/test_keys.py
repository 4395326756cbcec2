"""Services with an API key: what `test` uses for one, and when a missing one is told."""

import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from toolkit.files import Record
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.release.store import Store, content_digest, prepare_layout
from toolkit.service.command import release_unit
from toolkit.service.processes import identify
from toolkit.service.supervision import STATUS_FILE, Supervision


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """It knows nothing, and keeps the keys that it was asked with."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.server.keys.add(self.headers.get("Authorization"))
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.keys = set()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def secrets_file(tmp_path: Path, server: ThreadingHTTPServer) -> Path:
    """A release of `local-cpu` with a key is current, and served from here; where its secrets belong."""
    root = tmp_path / "root"
    sets = (f"host.root={root}", f"service.port={server.server_port}", "service.api_key={env: TEST_KEY}")
    loaded = load_profile("local-cpu", sets=sets)
    paths = Layout(root).service("local-cpu")
    prepare_layout(root, paths)
    store = Store(paths)
    manifest = {"environment": {"python": "/usr/bin/python3", "path": "/"}, "engine": {}}
    release = store.new_id(content_digest(loaded.data, manifest))
    unit = release_unit(loaded.profile, manifest, store.path(release), Layout(root))
    made = store.stage(release, profile=loaded.data, unit=unit, manifest=manifest)
    (made.path / "acceptance.json").write_text('{"verdict": "accepted"}')
    store.switch(release)
    record = tmp_path / "home" / ".local" / "state" / "ddtoolkit" / "services" / "local-cpu.json"
    record.parent.mkdir(parents=True)
    record.write_text(f'{{"root": "{root}"}}')
    paths.supervisor.mkdir()
    supervision = Record(paths.supervisor / STATUS_FILE)
    Supervision("running", "", time.time(), release, "mark", process=identify(os.getpid())).write(supervision)
    supervision.close()
    assert unit.secrets_file is not None
    return Path(unit.secrets_file)


def store_key(secrets_file: Path) -> None:
    secrets_file.parent.mkdir()
    secrets_file.write_text('"api-key": "stored"\n')


def test_the_stored_key_is_used(ddtoolkit: Command, server: ThreadingHTTPServer, secrets_file: Path) -> None:
    store_key(secrets_file)
    assert "refused" in ddtoolkit("test").stderr
    assert server.keys == {None, "Bearer stored"}


def test_without_a_stored_key_the_reference_is_read(
    ddtoolkit: Command, server: ThreadingHTTPServer, secrets_file: Path, tmp_path: Path
) -> None:
    environment = {"HOME": str(tmp_path / "home"), "TEST_KEY": "asked", "PATH": "/usr/bin:/bin"}
    assert "refused" in ddtoolkit("test", env=environment).stderr
    assert server.keys == {None, "Bearer asked"}


def test_with_neither_both_are_named(
    ddtoolkit: Command, server: ThreadingHTTPServer, secrets_file: Path
) -> None:
    shown = ddtoolkit("test")
    assert shown.returncode == 2
    assert f"{secrets_file} cannot be read: No such file or directory" in shown.stderr
    assert "env TEST_KEY: the variable is not set" in shown.stderr
    assert "export TEST_KEY" in shown.stderr
    assert "run it as the user who deployed the service" in shown.stderr
    assert server.keys == set()


def test_a_secret_that_is_missing_ends_a_deploy_before_anything_is_made(
    ddtoolkit: Command, tmp_path: Path
) -> None:
    (empty := tmp_path / "key").write_text("")
    sets = ("service.api_key={env: NO_SUCH_KEY}", f"service.admin_api_key={{file: {empty}}}")
    shown = ddtoolkit("deploy", "profile", "local-cpu", *(part for item in sets for part in ("--set", item)))
    assert shown.returncode == 2
    assert "service.api_key: secret env NO_SUCH_KEY: the variable is not set" in shown.stderr
    assert f"service.admin_api_key: secret file {empty}: is empty" in shown.stderr
    assert not (tmp_path / "home" / ".local").exists()


def test_a_secret_that_is_missing_ends_a_swap_before_the_build(
    ddtoolkit: Command, secrets_file: Path
) -> None:
    shown = ddtoolkit("swap", "--set", "service.api_key={env: NO_SUCH_KEY}")
    assert shown.returncode == 2
    assert "service.api_key: secret env NO_SUCH_KEY: the variable is not set" in shown.stderr
    assert "  build  " not in shown.stderr
    assert not (secrets_file.parents[3] / "envs").exists()
