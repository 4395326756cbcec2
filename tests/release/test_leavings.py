"""What killed processes leave half-made is gone once the next command holds the lock; nothing else is."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

from toolkit.build import bootstrap
from toolkit.build.environment import Environment, abandoned, materialise
from toolkit.layout import records
from toolkit.release.claims import claim
from toolkit.release.controller import hold


def everything(stub):
    top = stub.layout.root
    return {str(path.relative_to(top)) for path in top.rglob("*")}


@pytest.fixture
def settled(service):
    """A service whose release has secrets, after a first use of its lock."""
    release = service.stage("one")
    service.host.store.switch(release.id)
    secrets = service.host.secrets_file(release.id)
    secrets.parent.mkdir(mode=0o700)
    secrets.write_text('"api-key": "k"\n')
    service.layout.environments.mkdir()
    with hold(service.layout, service.name, "first"):
        pass
    return service


def test_leavings_are_removed_and_nothing_else(settled):
    before = everything(settled)
    paths, release = settled.paths, settled.host.store.current()
    leavings = [
        paths.releases / ".staging-20260101T000000Z-00000000" / "unit.json",
        release.path / ".acceptance.pending.json.x1y2z3w4",
        paths.state / "transaction.new" / "request.json",
        paths.state / "transaction.old" / "journal.jsonl",
        paths.state / ".experiment.json.0123456789ab",
        paths.state / "secrets" / "20260101T000000Z-00000000.yaml",
        paths.state / "secrets" / f".{release.id}.yaml.0123456789ab",
        settled.layout.environments / ".0123456789abcdef-x1y2z3w4" / "toolkit" / "layout.py",
    ]
    for path in leavings:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    (paths.base / f".current-{release.id}").symlink_to("releases/any")
    with hold(settled.layout, settled.name, "next"):
        assert everything(settled) - {"state/stub/lock"} == before
        assert settled.host.secrets_file(release.id).read_text() == '"api-key": "k"\n'


def test_an_environment_that_is_being_built_is_left_alone(settled):
    staging = settled.layout.environments / ".0123456789abcdef-x1y2z3w4"
    staging.mkdir()
    fd = os.open(staging, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with hold(settled.layout, settled.name, "next"):
        assert staging.is_dir()
    os.close(fd)
    assert list(abandoned(settled.layout.environments)) == [staging]


def test_unit_files_that_were_never_renamed_are_removed(settled, tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.service.unit_files.FOLDER", tmp_path)
    mine = [tmp_path / f".ddtoolkit-{name}.service.0123456789ab" for name in ("stub", "recover")]
    others = [tmp_path / ".ddtoolkit-other.service.0123456789ab", tmp_path / "ddtoolkit-stub.service"]
    for path in (*mine, *others):
        path.touch()
    with hold(settled.layout, settled.name, "next"):
        assert [*sorted(tmp_path.glob(".*.0123456789ab")), others[1]] == others


def test_a_build_holds_its_staging_folder(tmp_path, monkeypatch):
    environment = Environment(python=Path(sys.executable), versions={}, source="s")
    seen = []

    def copy(source, target, **_):
        target.mkdir()
        seen.append(list(tmp_path.glob(".*")))
        assert list(abandoned(tmp_path)) == []

    monkeypatch.setattr("toolkit.build.environment.shutil.copytree", copy)
    materialise(environment, tmp_path)
    assert len(seen[0]) == 1


def test_half_made_copies_of_the_toolkit_are_removed_unless_they_are_being_made(tmp_path):
    dead, alive, whole = (
        tmp_path / name for name in ("0123456789abcdef.17", "0123456789abcdef.18", "0123456789abcdef")
    )
    for folder in (dead, alive, whole):
        (folder / "toolkit").mkdir(parents=True)
    for name in ("python", ".python.0123456789ab"):
        (tmp_path / name).touch()
    fd = bootstrap.lock(alive)
    bootstrap.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [whole.name, alive.name, "python"]
    os.close(fd)
    bootstrap.clear(tmp_path)
    assert not alive.exists()


def test_the_claim_of_a_killed_first_deploy_is_removed_and_a_living_one_stays(settled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (claims_of := records()).mkdir(parents=True)
    others = claims_of / ".other.first"
    for path in (claims_of / f".{settled.name}.first", others):
        path.touch()
    with hold(settled.layout, settled.name, "next"):
        assert list(claims_of.iterdir()) == [others]
    with claim(settled.layout, settled.name, "deploy"), hold(settled.layout, settled.name, "next"):
        assert (claims_of / f".{settled.name}.first").is_file()
    assert list(claims_of.iterdir()) == [others]
