"""The straight line, and each way it ends otherwise, against a real process."""

from toolkit.release import history
from toolkit.release.controller import begin, follow, hold, result
from toolkit.release.request import Request


def change(service, kind, release, base=None, **more):
    """One transaction to its end; its outcome and events."""
    request = Request(
        kind=kind, who="a@b", release=release.id if release else None, base=base.id if base else None, **more
    )
    with hold(service.layout, service.name, "test"):
        folder = begin(service.layout, service.name, request)
        events = list(follow(folder))
    return result(folder), events


def test_first_deploy_then_second(service):
    first = service.stage("one")
    outcome, events = change(service, "deploy", first, acceptance=service.acceptance(requests=2))
    assert outcome.status == "committed"
    assert [e.step for e in events if e.state == "done"] == [
        "preflight",
        "stop_old",
        "switch",
        "start_new",
        "ready",
        "acceptance",
        "commit",
        "outcome",
    ]
    assert service.mark() == "one"
    assert service.host.store.current() == first
    assert first.acceptance["marks"] == ["one"]
    second = service.stage("two")
    outcome, _ = change(service, "deploy", second, first, acceptance=service.acceptance())
    assert (outcome.status, outcome.exit_code, outcome.serving) == ("committed", 0, second.id)
    assert service.mark() == "two"
    assert [entry.outcome for entry in history.read(service.paths)] == ["committed", "committed"]
    assert 0 < outcome.seconds["downtime"] <= outcome.seconds["total"]


def test_refused_release_is_rolled_back(service):
    first = service.stage("one")
    change(service, "deploy", first)
    second = service.stage("two")
    outcome, _ = change(
        service, "deploy", second, first, acceptance=service.acceptance(reasons=["acceptance length 1.6"])
    )
    assert (outcome.status, outcome.exit_code) == ("rolled_back", 5)
    assert "acceptance length 1.6" in outcome.message
    assert service.mark() == "one"
    assert service.host.store.current() == first
