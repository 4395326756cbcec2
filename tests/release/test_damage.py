"""Damaged and missing files of a service: every command reaches an outcome and says what is wrong."""

import json
import shutil

import pytest
from changes import change, steps

from toolkit.release import control, history
from toolkit.release.request import Acceptance
from toolkit.release.store import content_digest
from toolkit.release.view import status
from toolkit.service.secrets import stored_secrets
from toolkit.service.unit import SecretSource

UNTOUCHED = "; what serves was not touched"


def spoil(path, text="{"):
    path.chmod(0o644)
    path.write_text(text)


def rehash(release):
    """Let its files count as those that it was made with, as a version without a hash of each wrote it."""
    meta = {**release.meta, "digest": content_digest(release.built_profile, release.manifest)}
    del meta["files"]
    spoil(release.path / "release.json", json.dumps(meta))


def edit(path):
    """Change it by hand into what is still whole."""
    value = json.loads(path.read_text())
    if path.name == "unit.json":
        value["argv"].append("--edited")
    else:
        value["edited"] = 1
    spoil(path, json.dumps(value))


@pytest.fixture
def served(service):
    release = service.stage("one")
    change(service, "deploy", release)
    return release


@pytest.mark.parametrize("missing", [False, True])
def test_damaged_unit_of_the_current_release(service, served, missing):
    unit = served.path / "unit.json"
    if missing:
        unit.unlink()
    else:
        spoil(unit)
    outcome = control.restart(service.layout, service.name)
    assert outcome.status == "failed"
    assert str(unit) in outcome.message
    assert service.mark() == "one"
    shown = status(service.layout, service.name)
    assert (shown.state, shown.release) == ("running", served.id)
    assert any(str(unit) in line for line in shown.warnings)
    assert control.stop(service.layout, service.name).status == "committed"
    assert service.mark() is None
    assert control.start(service.layout, service.name).status == "failed"
    assert change(service, "test", served)[0].status == "failed"


def test_a_current_release_without_its_record_is_damaged_and_not_none(service, served):
    """Else the next deploy would be a first one, which leaves nothing serving where it fails."""
    (served.path / "release.json").unlink()
    current = service.host.store.current()
    assert current is not None
    assert current.id == served.id
    shown = status(service.layout, service.name)
    assert (shown.state, shown.release) == ("running", served.id)
    assert any("release.json" in line for line in shown.warnings)
    outcome, _ = change(service, "deploy", service.stage("two", "--exit-at-once", "3"), served)
    assert outcome.status == "rolled_back"
    assert service.mark() == "one"


def test_a_damaged_base_does_not_keep_the_new_release_away(service, served):
    spoil(served.path / "unit.json")
    new = service.stage("two")
    assert change(service, "deploy", new, served)[0].status == "committed"
    assert service.mark() == "two"


def test_a_release_whose_environment_is_gone_is_refused(service, tmp_path, served):
    gone = tmp_path / "gone"
    for release in (served, new := service.stage("two")):
        spoil(release.path / "manifest.json", json.dumps({"environment": {"path": str(gone)}}))
    outcome, _ = change(service, "swap", new, served)
    assert outcome.status == "not_started"
    assert f"{gone} is missing" in outcome.message
    assert outcome.hint == "ddtoolkit deploy profile stub"
    outcome = control.restart(service.layout, service.name)
    assert (outcome.status, outcome.message) == ("failed", f"{gone} is missing{UNTOUCHED}")
    assert service.mark() == "one"
    gone.mkdir()
    (gone / "environment.json").write_text("{}")
    rehash(new)
    assert change(service, "swap", new, served)[0].status == "committed"


@pytest.mark.parametrize("text", ["{", "[]", '{"environment": 5}', '{"environment": {"path": null}}'])
def test_a_manifest_that_cannot_be_read_is_damage(service, served, text):
    manifest = served.path / "manifest.json"
    spoil(manifest, text)
    outcome = control.restart(service.layout, service.name)
    assert outcome.status == "failed"
    assert outcome.message.startswith(f"{manifest}: ")
    assert "damaged" in outcome.message
    assert outcome.hint == "deploy the profile again: that builds a new release"
    assert service.mark() == "one"
    assert change(service, "deploy", service.stage("two"), served)[0].status == "committed"


def test_an_environment_whose_marker_cannot_be_read_is_damage(service, tmp_path, served):
    (marker := tmp_path / "environment.json").write_text('{"python": ')
    spoil(served.path / "manifest.json", json.dumps({"environment": {"path": str(tmp_path)}}))
    outcome = control.restart(service.layout, service.name)
    assert (outcome.status, outcome.message) == ("failed", f"{marker} is damaged{UNTOUCHED}")
    assert outcome.hint == "ddtoolkit deploy profile stub"
    outcome, _ = change(service, "swap", service.stage("two"), served)
    assert (outcome.status, service.mark()) == ("not_started", "one")


@pytest.mark.parametrize("kind", ["deploy", "swap", "rollback"])
def test_what_serves_is_not_stopped_where_it_could_not_be_started_again(service, tmp_path, served, kind):
    gone = tmp_path / "envs" / "0a1b"
    spoil(served.path / "manifest.json", json.dumps({"environment": {"path": str(gone)}}))
    pid = service.host.process_status().pid
    new = service.stage("two")
    outcome, events = change(service, kind, new, served)
    assert outcome.status == "not_started"
    assert f"no way back to {served.id}: {gone} is missing" in outcome.message
    assert "ddtoolkit stop stub" in outcome.hint
    assert "stop_old" not in steps(events, "begin")
    assert service.host.process_status().pid == pid
    assert control.stop(service.layout, service.name).status == "committed"
    assert change(service, kind, new, served)[0].status == "committed"
    assert service.mark() == "two"


def test_an_environment_that_vanishes_during_a_change_is_named(service, tmp_path, served):
    (folder := tmp_path / "env").mkdir()
    (folder / "environment.json").write_text("{}")
    spoil(served.path / "manifest.json", json.dumps({"environment": {"path": str(folder)}}))
    removes = ("/bin/sh", "-c", f'rm -r {folder}; echo "{{}}" > "$4"; exit 1', "sh")
    outcome, _ = change(service, "swap", service.stage("two"), served, acceptance=Acceptance(removes))
    assert outcome.status == "rollback_failed"
    assert f"{folder} is missing" in outcome.message
    assert service.mark() is None


@pytest.mark.parametrize("name", ["profile.json", "manifest.json", "unit.json"])
def test_a_release_that_hands_changed_is_not_started(service, served, name):
    edit(path := served.path / name)
    said = f"{path}: is not the one that the release was made with"
    assert any(line.startswith(said) for line in status(service.layout, service.name).warnings)
    pid = service.host.process_status().pid
    outcome = control.restart(service.layout, service.name)
    assert (outcome.status, outcome.message) == ("failed", f"{said}{UNTOUCHED}")
    assert "ddtoolkit deploy profile stub" in outcome.hint
    assert control.start(service.layout, service.name).message == "it serves already: nothing was started"
    assert service.host.process_status().pid == pid
    new = service.stage("two")
    assert change(service, "deploy", new, served)[0].status == "committed"
    pid = service.host.process_status().pid
    outcome, events = change(service, "rollback", served, new)
    assert (outcome.status, outcome.reason) == ("not_started", said)
    assert "stop_old" not in steps(events, "begin")
    assert service.host.process_status().pid == pid
    assert control.stop(service.layout, service.name).status == "committed"
    edit(new.path / name)
    assert control.start(service.layout, service.name).status == "failed"


def test_a_release_of_a_version_without_hashes_is_known_by_its_digest(service, served):
    rehash(served)
    assert control.restart(service.layout, service.name).status == "committed"
    edit(served.path / "profile.json")
    outcome = control.restart(service.layout, service.name)
    assert outcome.status == "failed"
    assert "profile.json or manifest.json is not the one that the release was made with" in outcome.message


def test_what_hands_changed_is_returned_to_rather_than_nothing(service, served):
    edit(served.path / "profile.json")
    refuses = Acceptance(("/bin/false",))
    outcome, _ = change(service, "swap", service.stage("two"), served, acceptance=refuses)
    assert (outcome.status, outcome.serving) == ("rolled_back", served.id)
    assert service.mark() == "one"


@pytest.mark.parametrize("missing", ["link", "release"])
def test_stop_needs_no_current_release(service, served, missing):
    if missing == "link":
        service.paths.current.unlink()
    else:
        shutil.rmtree(served.path)
    shown = status(service.layout, service.name)
    assert shown.state == "running"
    assert any(f"serves release {served.id}, while none is current" in line for line in shown.warnings)
    assert control.stop(service.layout, service.name).status == "committed"
    assert service.mark() is None


def test_stop_without_a_record_names_what_still_serves(service, served):
    record = service.paths.supervisor / "status"
    kept = record.read_bytes()
    pid = service.host.process_status().pid
    record.write_text("{")
    outcome = control.stop(service.layout, service.name)
    record.write_bytes(kept)
    assert outcome.status == "failed"
    assert f"in use by process {pid}" in outcome.message


def test_a_stop_on_request_is_not_hidden_by_what_changes_nothing(service):
    def after(*told):
        service.paths.history.unlink(missing_ok=True)
        for kind, outcome in told:
            history.append(service.paths, history.Entry("1", kind, outcome, "ann@desk"))
        return history.stopped_on_request(service.paths)

    stop = ("stop", "committed")
    for between in (("swap", "not_started"), ("swap", "rolled_back"), ("test", "failed"), ("stop", "failed")):
        assert after(stop, between)
        assert not after(("deploy", "committed"), between)
    assert after(stop, ("experiment", "rolled_back"), ("test", "committed"))
    assert not after(stop, ("start", "committed"), ("swap", "rolled_back"))
    assert not after(stop, ("swap", "rollback_failed"))


def test_odd_types_in_the_history_and_in_a_release(service):
    service.paths.history.write_text('{"id":1,"kind":null,"outcome":null,"who":null}\n[]\n5\n')
    assert history.read(service.paths) == []
    release = service.stage("one")
    spoil(release.path / "release.json", '{"swapped": 5}')
    assert release.swapped == ()


@pytest.mark.parametrize(
    "token",
    ['{"token":1,"who":2,"command":3,"since":"x","process":5,"host":null}', '{"token":"t","since":Infinity}'],
)
def test_a_damaged_lock_is_shown_and_taken_over(service, token):
    service.paths.lock.write_text(token)
    lock = service.host.lock
    assert lock.stale(lock.holder())
    assert "damaged" in status(service.layout, service.name).lock["who"]
    assert lock.holder().age().endswith(" s")
    with lock.hold("next") as held:
        assert "damaged" in held.taken_over.who
    assert lock.holder() is None


def test_start_leaves_the_secrets_of_what_serves_alone(service, monkeypatch):
    monkeypatch.setenv("STUB_KEY", "k")
    secrets = {"api-key": SecretSource(env="STUB_KEY")}
    release = service.stage("one", secrets=secrets, secrets_file=str(service.paths.state / "secrets.yaml"))
    change(service, "deploy", release)
    monkeypatch.setenv("STUB_KEY", "another")
    assert control.start(service.layout, service.name).status == "committed"
    assert stored_secrets(release.unit) == {"api-key": "k"}
