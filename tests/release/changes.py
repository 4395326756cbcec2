"""One transaction on the stub service, as a command would run it."""

from toolkit.release.controller import begin, follow, hold, result
from toolkit.release.request import Request


def request(kind, release=None, base=None, **more):
    return Request(
        kind=kind,
        who="ann@desk",
        release=None if release is None else release.id,
        base=None if base is None else base.id,
        **more,
    )


def change(service, kind, release=None, base=None, **more):
    """Run it to its end; the outcome and the events."""
    with hold(service.layout, service.name, f"test {kind}"):
        folder = begin(service.layout, service.name, request(kind, release, base, **more))
        events = list(follow(folder))
    return result(folder), events


def steps(events, state="done"):
    return [event.step for event in events if event.state == state]
