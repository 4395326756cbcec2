"""Packages that provisioning installed are purged although dpkg is killed in the middle of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts import apt
from tests.hosts.conftest import MakeHost
from tests.hosts.machines import Host

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
TOOL = "/opt/toolkit"
RECORD = "/srv/provisioned.json"
PACKAGES = ["probe-first", "probe-slow", "probe-last"]
# Says that it is at work, once, and takes its time.
SLOW = "#!/bin/sh\n[ -e /srv/slow ] && { rm /srv/slow; touch /srv/at-work; sleep 30; }\nexit 0\n"
GIVE_BACK = f"""
import json
from pathlib import Path
from toolkit.life.system import give_back
print(json.dumps(give_back(Path({RECORD!r}))))
"""
RUN = ["env", f"PYTHONPATH={TOOL}", "python3", "-c", GIVE_BACK]


@pytest.fixture(scope="module")
def host(make_host: MakeHost, tmp_path_factory: pytest.TempPathFactory) -> Host:
    folder = tmp_path_factory.mktemp("packages")
    for name in PACKAGES:
        scripts = {script: SLOW for script in ("prerm", "postrm") if name == "probe-slow"}
        apt.package(folder, name, "1.0-1", {f"/etc/{name}": "1\n"}, scripts)
    apt.index(folder)
    made = make_host("bookworm", binds=[f"{folder}:{apt.REPOSITORY}"])
    apt.forget_sources(made)
    apt.add_source(made)
    made.push(ROOT / "toolkit", f"{TOOL}/toolkit")
    return made


def begun(host: Host, when: str) -> subprocess.Popen[str]:
    """A removal that is at work in a script of the slow package."""
    apt.apt_install(host, *PACKAGES)
    host.root(["apt-mark", "hold", "probe-last"])
    host.path(RECORD).write_text(json.dumps({"packages": PACKAGES, "held": ["probe-last"], "enabled": []}))
    script = host.path(f"/var/lib/dpkg/info/probe-slow.{when}")
    for other in ("prerm", "postrm"):
        host.path(f"/var/lib/dpkg/info/probe-slow.{other}").write_text("#!/bin/sh\n")
    script.write_text(SLOW)
    host.path("/srv/slow").touch()
    host.path("/srv/at-work").unlink(missing_ok=True)
    command = [*host.ssh(), "--", shlex.join(["sudo", "-n", *RUN])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while not host.path("/srv/at-work").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    return process


def left(host: Host) -> str:
    shape = "--showformat=${Package} ${db:Status-Abbrev}\\n"
    return host.root(["dpkg-query", "--show", shape, "probe-*"], check=False).stdout


@pytest.mark.parametrize("when", ["prerm", "postrm"])
def test_what_dpkg_left_half_removed_is_removed(host: Host, when: str) -> None:
    with begun(host, when) as removing:
        host.root(["sh", "-c", "kill -9 $(pidof dpkg)"])
        out, _ = removing.communicate(timeout=60)
    removed, kept = json.loads(out)
    assert removed == ["hold of package probe-last", *(f"package {name}" for name in PACKAGES)]
    assert kept == []
    assert left(host) == ""
    assert host.root(["dpkg", "--audit"]).stdout == ""


@pytest.mark.parametrize("when", ["prerm", "postrm"])
def test_a_removal_that_was_killed_with_dpkg_is_gone_on_with(host: Host, when: str) -> None:
    with begun(host, when) as removing:
        host.root(["sh", "-c", "kill -9 $(pgrep -f '[l]ife.system') $(pidof apt-get) $(pidof dpkg)"])
        assert removing.wait(30) != 0
    assert "probe-slow" in left(host)
    removed, kept = json.loads(host.root(RUN).stdout)
    assert "package probe-slow" in removed
    assert kept == []
    assert left(host) == ""
    assert host.root(["dpkg", "--audit"]).stdout == ""
    assert not host.path(RECORD).exists()
