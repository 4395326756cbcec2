"""A first deploy that ends before its libraries are there: it is told, and taken back without a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import write_inventory
from tests.hosts.machines import Host
from toolkit.build.lock import lock_of

pytestmark = pytest.mark.timeout(400)

NAME = "systemd-cpu"
PROGRAM = Path(sys.executable).parent / "ddtoolkit"
HOUSE = "/srv/wheels"
ROOTS = ("/opt/ddtoolkit", "/var/lib/ddtoolkit", "/var/cache/ddtoolkit", "/var/log/ddtoolkit")

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def bare(make_host: MakeHost, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A host with a folder of files that have the names of the lock's wheels, and are none."""
    house = tmp_path_factory.mktemp("house")
    for name, version in lock_of("embedded").pins():
        (house / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").write_bytes(b"no wheel")
    return make_host("bookworm", name="ct200", binds=[f"{house}:{HOUSE}"])


@pytest.fixture(scope="module")
def ddtoolkit(bare: Host, tmp_path_factory: pytest.TempPathFactory) -> Command:
    path = tmp_path_factory.mktemp("inventory") / "inventory.yaml"
    write_inventory(path, [bare], {"ct200": {"ddtoolkit_profiles": [NAME]}})

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [PROGRAM, *arguments, "-i", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def made_by_us(host: Host) -> list[str]:
    users = host.root(["cut", "-d:", "-f1,6", "/etc/passwd"]).stdout.splitlines()
    return [
        *(path for path in ROOTS if host.path(path).exists()),
        *(user for user in users if user.endswith(":/var/cache/ddtoolkit")),
    ]


def test_a_wheelhouse_that_is_not_there_changes_nothing(ddtoolkit: Command, bare: Host) -> None:
    missing = ["--set", "host.wheelhouse=/srv/wheelz"]
    for command in (["plan", NAME], ["deploy", "profile", NAME, "--yes"]):
        said = ddtoolkit(*command, *missing, status=1).stderr
        assert "error: ct200: no wheelhouse /srv/wheelz on this host (host.wheelhouse)" in said
    assert made_by_us(bare) == ["/opt/ddtoolkit"]
    assert sorted(path.name for path in bare.path("/opt/ddtoolkit").iterdir()) == ["tool"]
    assert "nothing of ddtoolkit is there yet" in ddtoolkit("plan", NAME).stdout


def test_a_first_deploy_without_its_libraries_is_told_and_taken_back(ddtoolkit: Command, bare: Host) -> None:
    packages = bare.root(["dpkg-query", "--show"]).stdout
    done = ddtoolkit("deploy", "profile", NAME, "--set", f"host.wheelhouse={HOUSE}", "--yes", status=1)
    assert "torch" in done.stderr
    assert len(made_by_us(bare)) >= 4
    begun = "a deploy was begun there, and has not finished"
    assert f"ct200: {begun}" in ddtoolkit("status").stdout
    assert begun in ddtoolkit("plan", NAME).stdout
    assert "nothing runs there" in ddtoolkit("stop", NAME, "--yes").stderr
    assert "add --purge" in ddtoolkit("uninstall", NAME, "--yes").stderr
    assert len(made_by_us(bare)) >= 4

    release = "/opt/ddtoolkit/services/other/releases/one"
    bare.root(["mkdir", "-p", release])
    assert begun in ddtoolkit("uninstall", NAME, "--purge", "--yes", status=1).stderr
    assert begun in ddtoolkit("stop", NAME, "--yes", status=1).stderr
    bare.root(["rm", "-r", "/opt/ddtoolkit/services/other"])

    bare.root(["systemd-run", "--quiet", "--unit=ddtoolkit-lib-0123456789abcdef.service", "sleep", "600"])
    told = json.loads(ddtoolkit("uninstall", NAME, "--purge", "--yes", "--json").stdout)
    removed = told["hosts"]["ct200"]["result"]["removed"]
    assert {"/opt/ddtoolkit/tool", "/var/cache/ddtoolkit", "user ddtoolkit"} <= set(removed)
    assert made_by_us(bare) == []
    units = bare.root(["systemctl", "list-units", "--all", "--no-legend", "ddtoolkit-*"]).stdout
    assert units == ""
    assert bare.root(["dpkg-query", "--show"]).stdout == packages
    assert "ct200: no service is deployed there" in ddtoolkit("status").stdout
