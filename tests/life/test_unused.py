"""What no release needs, without any host."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from toolkit.build.environment import Environment, materialise, package_digest
from toolkit.build.libraries.install import MARKER
from toolkit.errors import ToolkitError
from toolkit.life.unused import remove, services_in, unused
from toolkit.release.store import content_digest

LIBRARIES, OTHER = "lib-0123456789abcdef", "lib-fedcba9876543210"
CODE = "0011223344556677"


def folder(service, name, *, age=3600.0):
    path = service.layout.environments / name
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x" * 10000)
    when = time.time() - age
    os.utime(path, (when, when))
    return path


def release(service, environment, python):
    manifest = {"environment": {"path": str(environment), "python": str(python)}}
    profile = {"name": service.name, "path": str(environment)}
    store = service.host.store
    release_id = store.new_id(content_digest(profile, manifest))
    return store.stage(release_id, profile=profile, unit=service.unit(release_id), manifest=manifest)


def test_what_a_release_needs_stays_and_the_rest_is_found_with_its_size(service):
    libraries, code, other = (folder(service, name) for name in (LIBRARIES, CODE, OTHER))
    release(service, code, libraries / "bin" / "python")
    (found,) = unused(service.layout)
    assert (found.path, found.what) == (other, "libraries")
    assert found.to_json()["path"] == str(other)
    assert 10000 <= found.size < 100000


def test_a_release_that_lost_its_record_by_hand_still_needs_what_it_is_made_of(service):
    libraries, code = folder(service, LIBRARIES), folder(service, CODE)
    (release(service, code, libraries / "bin" / "python").path / "release.json").unlink()
    assert unused(service.layout) == []


def test_nothing_is_unused_where_what_serves_has_lost_its_folder(service, monkeypatch):
    gone = release(service, folder(service, CODE), folder(service, LIBRARIES) / "bin" / "python")
    running = replace(service.host.process_status(), state="running", release=gone.id)
    monkeypatch.setattr("toolkit.release.host.ServiceHost.process_status", lambda self: running)
    shutil.rmtree(gone.path)
    with pytest.raises(ToolkitError, match=f"serves {gone.id}, whose folder is gone"):
        unused(service.layout)


def test_every_services_releases_count(service, tmp_path):
    from stub_service import StubService

    libraries, code = folder(service, LIBRARIES), folder(service, CODE)
    second = StubService(service.layout.root, "second")
    release(second, code, libraries / "bin" / "python")
    assert services_in(service.layout) == ["second", "stub"]
    assert unused(service.layout) == []


def test_what_is_young_or_under_way_or_nobodys_is_left(service):
    young = folder(service, LIBRARIES, age=10.0)
    busy = [folder(service, name) for name in (f".{OTHER}.new", OTHER)]
    folder(service, "notes")
    folder(service, "lib-zz")
    with (service.layout.environments / f".{OTHER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert unused(service.layout) == []
    assert [item.path for item in unused(service.layout)] == busy
    assert {item.path for item in unused(service.layout, young=0.0)} == {young, *busy}


@pytest.mark.parametrize("manifest", [{"environment": {}}, {"environment": {"path": "/x", "python": "p"}}])
def test_a_release_that_does_not_tell_what_it_needs_stops_everything(service, manifest):
    folder(service, LIBRARIES)
    store = service.host.store
    release_id = store.new_id(content_digest({}, manifest))
    store.stage(release_id, profile={"name": "stub"}, unit=service.unit(release_id), manifest=manifest)
    with pytest.raises(ToolkitError, match="does not tell what it needs; nothing is removed") as caught:
        unused(service.layout)
    assert release_id in caught.value.hint


def test_it_is_removed_with_its_lock(service):
    path = folder(service, LIBRARIES)
    lock = path.with_name(f".{LIBRARIES}.lock")
    lock.touch()
    (found,) = unused(service.layout)
    remove(found)
    assert list(service.layout.environments.iterdir()) == []


def test_what_runs_or_is_run_at_boot_or_by_hand_keeps_its_code(service, tmp_path, monkeypatch):
    timer, by_hand, other = (folder(service, name) for name in (CODE, LIBRARIES, OTHER))
    monkeypatch.setattr("toolkit.life.command.FOLDER", tmp_path)
    (tmp_path / "ddtoolkit").write_text(f"#!/bin/sh\nexec {by_hand}/bin/python -P\n")
    environment = os.environ | {"PYTHONPATH": str(timer)}
    with subprocess.Popen(["sleep", "60"], env=environment) as running:
        (found,) = unused(service.layout)
        running.kill()
    assert found.path == other
    assert {item.path for item in unused(service.layout)} == {timer, other}


def test_the_rest_of_a_removal_that_was_killed_is_found(service):
    folder(service, f".removed-{OTHER}.{os.getpid()}")  # at work
    rest = folder(service, f".removed-{LIBRARIES}.{2**22 + 1}")  # above any pid, proc(5)
    (found,) = unused(service.layout)
    assert (found.path, found.what) == (rest, "rest")
    remove(found)
    assert unused(service.layout) == []


def test_what_is_about_to_be_released_again_is_young(service):
    libraries = folder(service, LIBRARIES)
    python = libraries / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    lock = "1" * 64
    (libraries / MARKER).write_text(json.dumps({"lock": lock}))
    environment = Environment(python, {}, package_digest(), lock)
    code = materialise(environment, service.layout.environments)
    for path in (code, libraries):
        os.utime(path, (0, 0))
    assert {item.path for item in unused(service.layout)} == {code, libraries}
    materialise(environment, service.layout.environments)
    assert unused(service.layout) == []


def test_what_cannot_be_removed_is_named(service):
    path = folder(service, LIBRARIES)
    (found,) = unused(service.layout)
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(ToolkitError, match=f"{path}: cannot be removed: No such file"):
        remove(found)
