"""Which report of a release later ones are held against, and what `status` tells of it."""

import json

import pytest
from changes import change

from toolkit.deploy.bases import bases_of
from toolkit.deploy.watch import describe_status
from toolkit.release.request import Acceptance
from toolkit.release.view import status


def measures(speed, **more):
    """An acceptance that finds this speed and accepts it."""
    report = {"verdict": "accepted", "started": "2026-01-01T00:00:00Z", "tokens_per_second": speed, **more}
    return Acceptance(("/bin/sh", "-c", f"echo '{json.dumps(report)}' > \"$4\"", "sh"), {}, 10.0)


@pytest.fixture
def rolled_back_to(service):
    """The second of two releases serves; goes back to the first, which comes out at 80 tokens/s, not 100."""
    first, second = service.stage("one"), service.stage("two")
    change(service, "deploy", first, acceptance=measures(100))
    change(service, "deploy", second, first, acceptance=measures(99))

    def go(**more):
        outcome, _ = change(service, "rollback", first, second, acceptance=measures(80), **more)
        assert (outcome.status, outcome.serving) == ("committed", first.id), outcome.message
        return first, outcome

    return go


def test_a_rollback_leaves_the_bar_where_it_was(service, rolled_back_to):
    first, outcome = rolled_back_to()
    assert first.acceptance["tokens_per_second"] == 100
    assert bases_of(service.host, service.host.store.current())[0].acceptance["tokens_per_second"] == 100
    # The newer judgement is kept beside it, and is the one that is shown as what the rollback came to.
    assert outcome.report == str(first.path / "acceptance.latest.json")
    assert json.loads((first.path / "acceptance.latest.json").read_text())["tokens_per_second"] == 80
    told = dict(describe_status(status(service.layout, service.name).to_json()))
    assert told["accepted"] == "accepted, 2026-01-01 00:00:00Z, 100 tokens/s"
    assert told["judged again"] == "accepted, 2026-01-01 00:00:00Z, 80 tokens/s"
    assert not (first.path / "acceptance.pending.json").exists()


def test_a_new_baseline_moves_the_bar(service, rolled_back_to):
    first, outcome = rolled_back_to(new_baseline=True)
    assert first.acceptance["tokens_per_second"] == 80
    assert outcome.report == str(first.path / "acceptance.json")
    assert "judged again" not in dict(describe_status(status(service.layout, service.name).to_json()))


def test_a_trial_by_correctness_alone_sets_no_bar(service):
    first, second = service.stage("one"), service.stage("two")
    change(service, "deploy", first, acceptance=measures(50, mode="experiment"))
    change(service, "deploy", second, first, acceptance=measures(100))
    change(service, "rollback", first, second, acceptance=measures(90, mode="acceptance"))
    assert (first.acceptance["tokens_per_second"], first.judged_again) == (90, None)


def test_a_figure_that_was_not_judged_is_told(service):
    first = service.stage("one")
    change(service, "deploy", first)
    checks = [{"name": "tokens_per_second", "status": "not_judged"}, {"name": "lossless", "status": "passed"}]
    report = {"verdict": "accepted", "started": "2026-01-01T00:00:00Z", "tokens_per_second": 9}
    report["checks"] = checks
    (first.path / "acceptance.json").write_text(json.dumps(report))
    shown = status(service.layout, service.name)
    assert shown.accepted["not_judged"] == ["tokens_per_second"]
    told = dict(describe_status(shown.to_json()))["accepted"]
    assert told == "accepted, 2026-01-01 00:00:00Z, 9 tokens/s, not judged: tokens_per_second"
