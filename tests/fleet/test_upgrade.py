"""Wheels for the hosts of an upgrade, by the profile that each of them serves."""

import pytest

from tests.build.wheels import Site
from toolkit.errors import ToolkitError
from toolkit.fleet.results import HostResult
from toolkit.fleet.upgrade import Libraries
from toolkit.inventory.host import Host
from toolkit.profile.loading import load_profile

LOCAL = {"ansible_connection": "local"}
HOSTS = {name: Host(name, LOCAL) for name in ("box", "other")}


@pytest.fixture
def site(tmp_path, monkeypatch):
    made = Site(tmp_path, HOSTS["box"], tmp_path / "root")
    monkeypatch.setattr("toolkit.fleet.wheels.lock_for", lambda profile: made.lock)
    return made


def preview(host, root, *, changes=("toolkit: 1 -> 2",), libraries="mini, from the package index", sets=()):
    profile = load_profile("local-cpu", sets=[f"host.root={root}", *sets]).data
    return HostResult(host, {"changes": list(changes), "profile": profile, "libraries": libraries})


def test_what_comes_is_told_with_the_changes_and_brought(site):
    upgrade = Libraries(site.house, HOSTS, 2)
    planned, _ = upgrade.planned([preview("box", site.root), preview("other", site.root, changes=())])
    assert planned.value["changes"] == [
        "toolkit: 1 -> 2",
        f"wheels: 2 files, 3.0 MB, from {site.house} here",
        f"libraries: {site.lock.folder_name}: the locked libraries of the mini engine, from {site.store}",
    ]
    upgrade.check([planned])
    told = []
    (brought,) = upgrade.bring([planned], lambda host, message: told.append((host, message)))
    assert brought.ok
    assert told[0] == ("box", {"step": ["wheels", f"from {site.house}"]})
    assert site.whole()


def test_without_a_wheelhouse_or_with_nothing_to_install_nothing_comes(site):
    asked = [preview("box", site.root), preview("other", site.root, libraries=None)]
    without, same = Libraries(None, HOSTS, 2).planned(asked)
    assert without.value["changes"] == ["toolkit: 1 -> 2", "libraries: mini, from the package index"]
    assert "wheels" not in without.value
    assert same.value["changes"] == ["toolkit: 1 -> 2"]
    assert "wheels" not in Libraries(site.house, HOSTS, 2).planned(asked)[1].value


def test_where_a_host_cannot_have_its_libraries_no_other_is_begun(site):
    missing = preview("box", site.root, sets=["host.wheelhouse=/nowhere"])
    failed, other = Libraries(None, HOSTS, 2).planned([missing, preview("other", site.root)])
    assert "box: no wheelhouse /nowhere on this host" in failed.error.message
    assert other.skipped == "not begun, since box could not be planned"


def test_a_damaged_wheel_is_told_before_anything_is_sent(site):
    upgrade = Libraries(site.house, HOSTS, 2)
    planned = upgrade.planned([preview("box", site.root)])
    site.small.write_bytes(site.small.read_bytes() + b"x")
    with pytest.raises(ToolkitError, match=f"{site.small} is damaged"):
        upgrade.check(planned)
    assert not site.store.exists()
