"""Claims of first deploys, with what lies in their way."""

import errno
import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from toolkit.cli.service import _show_lock
from toolkit.deploy.watch import describe_status, observe, observed
from toolkit.errors import ConfigError, LockedError, ToolkitError
from toolkit.hostside.operations import lock_show
from toolkit.layout import Layout, records
from toolkit.release.claims import claim, claims, removal
from toolkit.release.locate import Deployed


@pytest.fixture
def layout(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    return Layout(tmp_path / "root")


@pytest.fixture
def place(layout):
    """Where the claim of the service `stub` lies."""
    records().mkdir(parents=True)
    return records() / ".stub.first"


def test_a_folder_that_whoever_left_removes_just_then_is_made_anew(layout, monkeypatch):
    folder, is_dir, removed = records(), Path.is_dir, []
    folder.mkdir(parents=True)

    def late(path):
        if path == folder and not removed:
            removed.append(folder.rmdir())
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", late)
    with claim(layout, "stub", "deploy"):
        assert (folder / ".stub.first").is_file()
    assert removed


def test_what_lies_in_place_of_the_folder_is_told_at_once(layout):
    records().parent.mkdir(parents=True)
    records().touch()
    with pytest.raises(ToolkitError, match="cannot take the lock: File exists") as caught:
        claim(layout, "stub", "deploy", wait=60).__enter__()
    assert str(records()) in caught.value.hint


@pytest.mark.parametrize("lay", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_file_is_told(layout, place, lay):
    lay(place)
    with pytest.raises(ToolkitError, match=r"\.stub\.first: cannot take the lock: ") as caught:
        claim(layout, "stub", "deploy", wait=60).__enter__()
    assert not isinstance(caught.value, LockedError)
    lay(records() / ".removal.lock")
    with pytest.raises(ToolkitError, match=r"\.removal\.lock: cannot take the lock: "):
        removal("stub", 60.0).__enter__()


@pytest.mark.parametrize("name", [None, "stub"])
def test_the_lock_of_a_service_that_is_only_claimed_is_its_claim(layout, capsys, name):
    with pytest.raises(ConfigError, match="deployed"):
        lock_show({"service": name})
    with claim(layout, "stub", "deploy profile stub"):
        found = lock_show({"service": name})
        _show_lock(found)
    assert (found["service"], found["holder"]["command"]) == ("stub", "deploy profile stub")
    assert capsys.readouterr().out == f"stub: held by {found['holder']['who']} for 0 s: deploy profile stub\n"


def test_the_lock_of_a_claim_that_tells_nothing_yet_is_shown(layout, place, capsys):
    place.touch()
    with place.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _show_lock(lock_show({"service": "stub"}))
    assert capsys.readouterr().out == "stub: held by someone who has just begun\n"


def test_a_first_deploy_that_has_no_more_than_its_claim_is_shown(layout):
    assert observed(None) == []
    with claim(layout, "stub", "deploy profile stub --set a.b=1"):
        (shown,) = observed(None)
        assert observed("stub") == [shown]
        rows = dict(describe_status(shown))
        lock = shown["lock"]
    assert (shown["name"], shown["state"]) == ("stub", "deploying")
    assert lock["who"].endswith(f" pid {os.getpid()}")
    assert shown["since"] == lock["since"]
    began = rf"first deploy by {re.escape(lock['who'])} since \d{{4}}-\S+ \S+Z \(\d s\), being prepared "
    assert re.match(began, rows["under way"])
    assert observed(None) == []
    with pytest.raises(ConfigError, match="no service 'stub' is deployed"):
        observed("stub")


def test_a_removal_is_no_first_deploy(layout):
    with claim(layout, "stub", "uninstall", removing=True):
        assert observed(None) == []


def test_a_first_deploy_whose_folders_are_made_already_is_shown(service, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    deployed = Deployed(service.name, service.layout)
    assert observe(deployed)["state"] == "absent"
    with claim(service.layout, "stub", "deploy profile stub"):
        shown = observe(deployed)
    assert (shown["state"], shown["lock"]["command"]) == ("deploying", "deploy profile stub")


@pytest.mark.parametrize("since", ["x", float("inf"), None])
def test_a_damaged_claim_is_one_that_has_just_begun(layout, place, since):
    holder = {"token": "t", "who": "w", "command": "c", "since": since, "process": None, "host": "h"}
    place.write_text(json.dumps({"holder": holder, "root": str(layout.root)}))
    with place.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert claims(layout) == ["stub"]
        with pytest.raises(LockedError, match="stub is locked by someone who has just begun"):
            claim(layout, "stub", "deploy").__enter__()


@pytest.mark.parametrize("since", [1e300, -1e18])
def test_a_claim_of_a_time_that_is_none_is_shown(layout, place, since):
    command = "deploy profile stub"
    holder = {"token": "t", "who": "w", "command": command, "since": since, "process": None, "host": "h"}
    place.write_text(json.dumps({"holder": holder, "root": str(layout.root)}))
    with place.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (shown,) = observed(None)
    told = dict(describe_status(shown))
    assert told["state"].startswith("deploying since an unknown time (")
    assert told["under way"].startswith("first deploy by w since an unknown time (")


def test_a_claim_whose_file_cannot_be_removed_ends_all_the_same(layout, place):
    with claim(layout, "stub", "deploy"):
        place.unlink()
        place.mkdir()
    assert place.is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_what_helps(layout, monkeypatch, number):
    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ToolkitError, match="cannot take the lock: ") as caught:
        claim(layout, "stub", "deploy").__enter__()
    assert caught.value.hint == "free some space, and run the same command again"
