"""Releases: written whole or not at all, immutable, ordered, pruned with care."""

import os
from datetime import UTC, datetime

import pytest

from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.changes import Change
from toolkit.release.store import content_digest


def test_release_holds_what_was_staged(service):
    release = service.host.store
    profile, manifest = {"name": "stub", "x": [1, "é"]}, {"torch": "2.13"}
    digest = content_digest(profile, manifest)
    release_id = release.new_id(digest, datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC))
    assert release_id == f"20260304T050607Z-{digest[:8]}"
    staged = release.stage(
        release_id,
        profile=profile,
        unit=service.unit(release_id),
        manifest=manifest,
        sources={"local-cpu.yaml": b"schema: 1\n"},
        changes=[Change("speculative.budget", 16, 7)],
        swapped=["speculative.budget"],
    )
    again = release.get(release_id)
    assert again == staged
    assert (again.profile, again.manifest, again.digest) == (profile, manifest, digest)
    assert again.unit == service.unit(release_id)
    assert again.meta["changes"] == [{"key": "speculative.budget", "old": 16, "new": 7}]
    assert again.swapped == ("speculative.budget",)
    assert (again.path / "sources" / "local-cpu.yaml").read_bytes() == b"schema: 1\n"
    assert again.acceptance is None
    again.record({"name": "stub", "mark": "one", "more": 1}, swapped=["more"], sources={})
    assert (again.profile["more"], again.swapped) == (1, ("more",))
    assert "more" not in again.built_profile
    assert content_digest(again.built_profile, again.manifest) == again.digest
    for path in again.path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o444)


def test_digest_tells_contents_apart_and_not_their_order():
    assert content_digest({"a": 1, "b": 2}, {}) == content_digest({"b": 2, "a": 1}, {})
    assert content_digest({"a": 1}, {}) != content_digest({"a": 2}, {})
    assert content_digest({"a": 1}, {}) != content_digest({}, {"a": 1})


def test_ids_follow_the_order_of_making_even_when_the_clock_steps_back(service):
    made = [service.stage(str(number)).id for number in range(3)]
    store = service.host.store
    early = store.new_id("f" * 64, datetime(2000, 1, 1, tzinfo=UTC))
    assert early > made[-1]
    assert [release.id for release in store.all()] == made == sorted(made)


@pytest.mark.parametrize("text", ["", "../x", "20260304T050607Z", "20260304T050607Z-../../x", "current"])
def test_what_is_no_id_is_refused(service, text):
    with pytest.raises(ConfigError, match="no release id"):
        service.host.store.path(text)


def test_absent_release_and_foreign_unit_are_refused(service):
    store = service.host.store
    with pytest.raises(ConfigError, match="no release 20260304T050607Z-01234567"):
        store.get("20260304T050607Z-01234567")
    with pytest.raises(ToolkitError, match="unit is for release other"):
        store.stage(store.new_id("0" * 8), profile={}, manifest={}, unit=service.unit("other"))


def test_current_is_switched_in_one_step(service):
    store, first, second = service.host.store, service.stage("one"), service.stage("two")
    assert store.current() is None
    store.switch(first.id)
    assert store.current() == first
    assert os.readlink(service.paths.current) == f"releases/{first.id}"  # noqa: PTH115
    store.prepare_switch(second.id)
    assert store.current() == first
    store.switch(second.id)
    assert store.current() == second
    store.switch(None)
    assert store.current() is None


def test_half_written_release_is_not_seen(service):
    store, first = service.host.store, service.stage("one")
    (service.paths.releases / ".staging-20260304T050607Z-01234567").mkdir()
    (service.paths.releases / "20260304T050607Z-01234567").mkdir()
    (service.paths.releases / "notes").mkdir()
    assert store.all() == [first]


def test_damaged_release_is_named(service):
    first = service.stage("one")
    path = first.path / "profile.json"
    path.unlink()
    path.write_text("{")
    with pytest.raises(ToolkitError, match=str(path)):
        _ = first.profile


def test_prune_removes_the_oldest_unprotected(service):
    made = [service.stage(str(number)) for number in range(5)]
    removed = service.host.store.prune(2, {made[1].id})
    assert removed == [made[0].id, made[2].id]
    assert service.host.store.all() == [made[1], made[3], made[4]]


def test_prune_removes_what_was_refused_before_what_was_accepted(service):
    made = [service.stage(str(number)) for number in range(5)]
    for release in made[:2]:
        (release.path / "acceptance.json").write_text("{}")
    assert service.host.store.prune(3, {made[4].id}) == [made[2].id, made[3].id]
    assert service.host.store.all() == [made[0], made[1], made[4]]


@pytest.mark.parametrize("asked", ["2026", "20260304T050607Z-00112233"])
def test_the_next_step_of_a_wrong_id_names_the_service(service, asked):
    with pytest.raises(ConfigError) as caught:
        service.host.store.get(asked)
    assert caught.value.hint.startswith("ddtoolkit history stub")
