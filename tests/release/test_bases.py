"""What a change is judged against: the current release, then what served the same target before it."""

import pytest
from changes import change

from toolkit.deploy.bases import bases_of


def made(service, name, target="bundled"):
    return service.stage(name, profile={"model": {"target": {"source": target}}})


@pytest.fixture
def served(service):
    releases = [made(service, "one"), made(service, "other", "/models/x"), made(service, "two")]
    base = None
    for release in releases:
        assert change(service, "deploy", release, base)[0].status == "committed"
        base = release
    return releases


def test_what_served_the_same_target_stands_behind_the_base(service, served):
    one, other, two = served
    assert [release.id for release in bases_of(service.host, two)] == [two.id, one.id]
    assert [release.id for release in bases_of(service.host, other)] == [other.id]
    assert bases_of(service.host, None) == ()


def test_a_pruned_release_is_left_out(service, served):
    one, _, two = served
    service.host.store.prune(1, {two.id})
    assert [release.id for release in bases_of(service.host, two)] == [two.id]
    assert not one.path.exists()
