"""Level full: the release is launched otherwise, measured, launched again, and judged."""

import json

import pytest
from changes import change, request, steps
from stub_service import ACCEPTS
from test_recovery import die_at

from toolkit.release import history
from toolkit.release.controller import hold
from toolkit.release.request import Comparison, Launch


def comparison(service, release, *, flags=(), refuse=(), measure_refuses=()):
    """Launches of `release` whose server answers with their own names."""
    launches = []
    for name in ("dflash", "chain"):
        unit = service.unit(release.id, "--mark", name, *flags)
        launches.append(
            Launch(name, unit.to_json(), service.acceptance(requests=1, reasons=list(measure_refuses)))
        )
    return Comparison(tuple(launches), service.acceptance(requests=1, reasons=list(refuse)))


@pytest.fixture
def first(service):
    release = service.stage("one")
    change(service, "deploy", release, acceptance=ACCEPTS)
    return release


def test_each_launch_is_measured_and_the_release_serves_again(service, first):
    second = service.stage("two")
    outcome, events = change(
        service,
        "deploy",
        second,
        first,
        acceptance=service.acceptance(requests=1),
        comparison=comparison(service, second),
    )
    assert outcome.status == "committed", outcome.message
    assert [step for step in steps(events) if step.startswith("measure") or step == "compare"] == [
        "measure_dflash",
        "measure_chain",
        "compare",
    ]
    # The launches really were other servers, and the release itself was judged by the comparison.
    assert json.loads((second.path / "acceptance.json").read_text())["marks"] == [
        "chain: chain",
        "dflash: dflash",
        "two",
    ]
    assert service.mark() == "two"
    assert [entry.kind for entry in history.read(service.paths)] == ["deploy", "deploy"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"refuse": ["not the same tokens"]}, "not the same tokens"),
        ({"measure_refuses": ["no answer"]}, "no answer"),
        ({"flags": ("--no-such-flag",)}, "ended with status 2"),
    ],
)
def test_a_launch_that_fails_undoes_the_release(service, first, fault, said):
    second = service.stage("two")
    outcome, _ = change(
        service,
        "deploy",
        second,
        first,
        acceptance=service.acceptance(requests=1),
        comparison=comparison(service, second, **fault),
    )
    assert (outcome.status, outcome.serving) == ("rolled_back", first.id)
    assert said in outcome.message
    assert bool(outcome.log) == ("flags" in fault)  # the server's last words belong to its own failure
    assert service.mark() == "one"


def test_a_test_keeps_the_report_that_the_release_was_accepted_with(service, first):
    accepted = (first.path / "acceptance.json").read_bytes()
    outcome, _ = change(
        service,
        "test",
        first,
        acceptance=service.acceptance(requests=1),
        comparison=comparison(service, first),
    )
    assert (outcome.status, outcome.exit_code, service.mark()) == ("committed", 0, "one")
    assert outcome.report == str(service.paths.state / "test-report.json")
    assert (first.path / "acceptance.json").read_bytes() == accepted


def test_a_test_that_fails_leaves_the_release_serving(service, first):
    outcome, _ = change(
        service,
        "test",
        first,
        acceptance=service.acceptance(requests=1),
        comparison=comparison(service, first, flags=("--no-such-flag",)),
    )
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    assert service.mark() == "one"


@pytest.mark.parametrize("line", [5, 9, 14])
def test_a_test_that_is_killed_leaves_the_release_serving(service, first, monkeypatch, line):
    asked = request(
        "test", first, acceptance=service.acceptance(requests=1), comparison=comparison(service, first)
    )
    assert die_at(monkeypatch, service, asked, line)
    with hold(service.layout, service.name, "status") as session:
        assert session.recovered is not None
        assert session.recovered.status == "failed"
    assert service.mark() == "one"
    assert service.paths.current.readlink().name == first.id
