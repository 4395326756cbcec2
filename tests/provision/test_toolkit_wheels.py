"""The action by which playbooks bring wheels, by a real ansible-playbook, to this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.build.wheels import Site
from toolkit.inventory.host import Host
from toolkit.resources import bundled

ROOT = Path(__file__).parents[2]
ARRIVED = 2_000_000


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path, Host("box"), tmp_path / "root")
    (made.house / "mini.txt").write_text(made.lock.text)
    return made


def played(site: Site, folder: Path, tasks: list[dict], *more: str) -> list[dict]:
    """What each task ended with; each is the action with other arguments."""
    settings = {"engine": "mini", "lock": site.lock.sha256, "environment": site.lock.folder_name}
    settings |= {"root": str(site.root), "min_free": 0}
    given = {"folder": str(site.house), "settings": settings, "tool": str(ROOT), "python": sys.executable}
    plays = [{"toolkit_wheels": given | task, "ignore_errors": True} for task in tasks]
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": plays}]))
    plugins = bundled("playbooks") / "roles" / "toolkit" / "action_plugins"
    environment = {"ANSIBLE_ACTION_PLUGINS": str(plugins), "ANSIBLE_LOCALHOST_WARNING": "False"}
    environment |= {"ANSIBLE_INVENTORY_UNPARSED_WARNING": "False"}
    environment |= {"ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal", "ANSIBLE_NOCOLOR": "1"}
    command = [Path(sys.executable).with_name("ansible-playbook"), path, *more]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=os.environ | environment
    )
    return _results(done.stdout)


def _results(text: str) -> list[dict]:
    """The objects that the callback `minimal` prints after `HOST | STATUS => `."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (at := text.find(" => {", at)) >= 0:
        value, at = decoder.raw_decode(text, at + len(" => "))
        found.append(value)
    return found


def test_what_is_lacking_comes_in_pieces_and_what_is_wrong_is_refused_by_name(site, tmp_path):
    data = site.large.read_bytes()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in site.house.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    (damaged / site.large.name).write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mini.txt").write_text("# another lock\n")
    site.store.mkdir(parents=True)
    (site.store / f".{site.large.name}.part").write_bytes(data[:ARRIVED])
    tasks = [{"folder": str(elsewhere)}, {"folder": str(damaged)}, {"folder": str(tmp_path / "none")}, {}, {}]
    other, rotten, absent, first, second = played(site, tmp_path, tasks)
    assert f"{elsewhere}/mini.txt is not the lock of these settings" in other["msg"]
    assert f"{damaged / site.large.name} is damaged" in rotten["msg"]
    assert "nothing was sent" in rotten["msg"]
    assert "none/mini.txt: No such file or directory; ddtoolkit wheelhouse makes it" in absent["msg"]
    assert (first["changed"], first["wheels"]) == (True, [site.large.name, site.small.name])
    assert (second["changed"], second["wheels"]) == (False, [])
    assert site.whole()
    assert (site.store / f"{site.lock.folder_name}.txt").read_text() == site.lock.text


def test_check_mode_tells_and_brings_nothing(site, tmp_path):
    (told,) = played(site, tmp_path, [{"tool": str(tmp_path)}], "--check")
    assert (told["changed"], told["msg"]) == (True, "nothing of the toolkit is there yet")
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "toolkit").symlink_to(ROOT / "toolkit")
    (tool / ".complete").touch()
    (told,) = played(site, tmp_path, [{"tool": str(tool)}], "--check")
    assert (told["changed"], len(told["wheels"])) == (True, 2)
    assert not site.store.exists()


def test_wheels_of_which_nothing_would_be_installed_are_refused(tmp_path):
    """As where the profile names an interpreter: else a wrong folder would go unnoticed."""
    values = {
        "toolkit_archive": "/nowhere",
        "toolkit_folder": str(tmp_path / "tool"),
        "toolkit_libraries": [],
    }
    values |= {"toolkit_wheelhouse": "/nowhere", "toolkit_wheels": {}}
    task = {"ansible.builtin.include_role": {"name": "toolkit"}, "vars": values}
    path = tmp_path / "play.yml"
    path.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]))
    environment = {"ANSIBLE_ROLES_PATH": str(bundled("playbooks") / "roles"), "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), path],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | environment,
    )
    assert done.returncode == 2
    assert "toolkit_wheelhouse /nowhere: no libraries are installed for this profile" in done.stdout
    assert not (tmp_path / "tool").exists()
