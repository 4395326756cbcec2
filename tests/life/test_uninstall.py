"""Giving this machine back below a root, with a real service of the process manager."""

import subprocess
import sys
import time

import pytest
from changes import change
from stub_service import ACCEPTS, StubService

from toolkit.errors import ConfigError, LockedError, ToolkitError
from toolkit.layout import Layout, records
from toolkit.life.uninstall import uninstall
from toolkit.release import control, history
from toolkit.release.claims import claim, removal
from toolkit.release.controller import hold
from toolkit.release.locate import Deployed, deployed_services, find_removable, remember


@pytest.fixture
def deployed(service):
    found = Deployed(service.name, service.layout)
    remember(found)
    change(service, "deploy", service.stage("one"), acceptance=ACCEPTS)
    assert service.mark() == "one"
    return found


def left(service):
    root = service.layout.root
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_it_is_stopped_and_removed_and_its_history_stays(service, deployed):
    done = uninstall(deployed, purge=False, wait=0.0)
    assert service.mark() is None
    assert deployed_services() == []
    kept = {name for name in left(service) if not name.startswith(("state/stub/lock", "state/stub/reserve"))}
    assert kept == {"state/stub/history.jsonl"}
    assert [entry.kind for entry in history.read(service.paths)] == ["deploy", "stop", "uninstall"]
    assert done.kept == [f"{service.paths.history}: its history (--purge removes it)"]
    assert {str(service.paths.base), str(service.paths.cache), str(service.paths.log)} <= set(done.removed)
    outcome = done.to_json()["outcome"]
    assert outcome["status"] == "committed"
    assert outcome["hint"].endswith("history stub shows it; ddtoolkit uninstall stub --purge removes it")


def test_purge_leaves_nothing_but_checkpoints(service, deployed):
    checkpoint = service.layout.models / "kimi@main"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").touch()
    done = uninstall(deployed, purge=True, wait=0.0)
    assert left(service) == ["models/kimi@main/model.safetensors"]
    assert done.kept == [f"{service.layout.models}: checkpoints"]
    assert done.message == f"stub is removed: {len(done.removed)} things"
    assert done.to_json()["outcome"]["hint"] is None


def test_a_first_deploy_that_was_killed_before_its_first_folder_is_found_and_taken_away(service, tmp_path):
    begun = Deployed("begun", Layout(tmp_path / "other"))
    remember(begun)
    assert (deployed_services(), find_removable(None)) == ([], begun)
    done = uninstall(find_removable(None), purge=True, wait=0.0)
    assert done.removed == []  # what its own lock took is not told as something that was there
    assert done.message == "begun is removed: 0 things; nothing of it is left on this machine"
    assert not (tmp_path / "other").exists()
    assert not records().exists()
    with pytest.raises(ConfigError, match="no service is deployed on this machine"):
        find_removable(None)


def test_of_two_that_were_begun_none_is_taken_for_the_other(service):
    for name in ("one", "two"):
        remember(Deployed(name, service.layout))
    with pytest.raises(ConfigError, match="no service is deployed on this machine") as caught:
        find_removable(None)
    assert "ddtoolkit uninstall one --purge takes away what it has made" in caught.value.hint


def test_with_another_service_only_its_own_goes(service, deployed):
    other = StubService(service.layout.root, "other")
    release = other.stage("two")
    uninstall(deployed, purge=True, wait=0.0)
    assert other.host.store.get(release.id).unit.name == "other"
    assert not service.paths.base.exists()
    assert not service.paths.state.exists()


def test_a_stopped_service_can_be_removed(service, deployed):
    control.stop(service.layout, service.name)
    uninstall(deployed, purge=True, wait=0.0)
    assert left(service) == []


def test_nothing_is_removed_while_somebody_changes_it(service, deployed):
    before = left(service)
    with hold(service.layout, service.name, "swap"), pytest.raises(LockedError, match="swap"):
        uninstall(deployed, purge=True, wait=0.0)
    assert service.mark() == "one"
    assert set(before) <= set(left(service))


def test_a_service_that_cannot_be_stopped_is_left_whole(service, deployed, monkeypatch):
    class Stuck:
        status, message, hint = "failed", "pid 7 does not end", "kill -9 7"

    monkeypatch.setattr("toolkit.life.uninstall.control.stop", lambda *_, **__: Stuck)
    with pytest.raises(
        ToolkitError, match="cannot be stopped: pid 7 does not end; nothing was removed"
    ) as caught:
        uninstall(deployed, purge=True, wait=0.0)
    assert caught.value.hint == "kill -9 7"
    assert service.mark() == "one"
    assert service.host.store.current() is not None


def test_links_in_the_cache_are_not_followed(service, deployed, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (service.paths.cache / "link").symlink_to(precious)
    uninstall(deployed, purge=True, wait=0.0)
    assert (precious / "file").exists()


@pytest.mark.parametrize("where", ["_remove_unused", "_remove_folders"])
def test_a_purge_that_was_killed_is_gone_on_with(service, deployed, where):
    text = f"""
import os
from toolkit.life import uninstall
from toolkit.release.locate import find_service
uninstall.{where} = lambda *_, **__: os._exit(9)
uninstall.uninstall(find_service("{service.name}"), purge=True, wait=0.0)
"""
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 9
    assert deployed_services() == []
    uninstall(find_removable(service.name), purge=True, wait=0.0)
    assert left(service) == []
    with pytest.raises(ConfigError, match="no service 'stub' is deployed"):
        find_removable(service.name)


def test_an_interrupt_in_the_middle_says_what_it_left(service, deployed):
    text = f"""
import os, signal, sys
from toolkit.life import uninstall
uninstall._remove_unused = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["ddtoolkit", "uninstall", "{service.name}", "--purge", "--yes"]
from toolkit.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert (
        "interrupted; stub may be stopped and removed in part\n  next: the same command again" in done.stderr
    )
    uninstall(find_removable(service.name), purge=True, wait=0.0)
    assert left(service) == []


def test_what_is_wrong_with_another_service_is_told_and_ends_nothing(service, deployed):
    other = StubService(service.layout.root, "other")
    release = other.stage("two")
    manifest = release.path / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text('{"environment": {"python": "/nowhere"}}')
    done = uninstall(deployed, purge=True, wait=0.0)
    assert not service.paths.base.exists()
    assert deployed_services() == []
    (line,) = done.kept
    assert line.startswith(f"what no release needs: {release.path}: its manifest does not tell")


def test_two_removals_take_turns(service, deployed):
    begun: list[int] = []
    with removal("other", 0.0):
        begin = time.monotonic()
        with pytest.raises(LockedError, match="stub: a service is being removed on this machine") as caught:
            uninstall(deployed, purge=True, wait=0.5, on_begun=lambda: begun.append(1))
        assert time.monotonic() - begin >= 0.5
    assert "--lock-wait" in caught.value.hint
    assert (service.mark(), begun) == ("one", [])
    uninstall(deployed, purge=True, wait=0.0, on_begun=lambda: begun.append(1))
    assert begun == [1]


def claimed(service, name):
    """A process that is about to deploy a service for the first time, until its input is closed."""
    text = f"""
import sys
from toolkit.life.uninstall import Layout
from toolkit.release.controller import reserve
from pathlib import Path
with reserve(Layout(Path({str(service.layout.root)!r})), {name!r}, "deploy profile {name}", deploys=True):
    print("claimed", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", text]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "claimed\n"
    return process


def test_a_purge_leaves_what_services_share_to_a_first_deploy(service, deployed):
    with claimed(service, "other"):
        done = uninstall(deployed, purge=True, wait=0.0)
    assert service.layout.services.is_dir()
    assert service.layout.state.is_dir()
    assert not service.paths.state.exists()
    (line,) = (line for line in done.kept if "share" in line)
    assert line.startswith("what services share: other (deploy profile other by ")
    assert line.endswith(") is under way")


def test_a_first_deploy_waits_for_the_end_of_a_removal(service, deployed):
    told = []
    with removal(service.name, 0.0):
        with pytest.raises(LockedError, match="other: a service is being removed on this machine just now"):
            claim(service.layout, "other", "deploy", wait=0.3, on_wait=told.append).__enter__()
        assert "waiting for it, 1 s at most" in told[0]
    with claim(service.layout, "other", "deploy"):
        pass


def test_a_service_is_not_removed_while_its_first_deploy_makes_it(service, deployed):
    with claimed(service, "other"):
        other = StubService(service.layout.root, "other")
        other.stage("two")
        found = Deployed(other.name, other.layout)
        with pytest.raises(LockedError, match=r"other is locked by .*: deploy profile other"):
            uninstall(found, purge=True, wait=0.0)
        assert other.paths.releases.is_dir()
    uninstall(found, purge=True, wait=0.0)
    uninstall(deployed, purge=True, wait=0.0)
    assert left(service) == []
    assert not records().exists()
