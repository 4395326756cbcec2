"""What commands do apart from deploying: logs, start, stop, restart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from toolkit.errors import ConfigError, StoppedWatchingError, ToolkitError
from toolkit.layout import Layout
from toolkit.release.controller import Session, begin, follow, hold, result
from toolkit.release.history import stopped_on_request
from toolkit.release.host import ServiceHost
from toolkit.release.journal import Event
from toolkit.release.lock import whoami
from toolkit.release.request import Kind, Outcome, Request


def logs(
    layout: Layout,
    name: str,
    lines: int = 100,
    *,
    follow: bool = False,
    ended: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """The last `lines` lines of the server's output; with `follow` also each further one, across rotation.

    Args:
        layout: where things lie.
        name: name of the service.
        lines: how many come first.
        follow: go on until `ended` says so, else for ever.
        ended: asked whenever nothing new is there.

    Raises:
        ConfigError: the service has no log yet.
    """
    host = ServiceHost(layout, name)
    current = host.store.current()
    manager = host.manager(None)
    with contextlib.suppress(ToolkitError):  # of a damaged release too
        manager = host.manager(current.unit if current else None)
    return manager.logs(lines, follow=follow, ended=ended or (lambda: False))


def start(
    layout: Layout,
    name: str,
    *,
    wait: float = 0.0,
    command: str = "start",
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Outcome:
    """Start the current release and wait for a real token; nothing happens to one that serves already.

    Args:
        layout: where things lie.
        name: name of the service.
        wait: seconds to wait for the lock.
        command: the command given, for the history.
        on_event: called with each event.
        on_wait: called with a line on whom is waited for, and how long yet.

    Raises:
        ConfigError: nothing is deployed.
        LockedError: someone else is changing the service.
        ToolkitError: it cannot be begun.
    """
    return _simple(layout, name, "start", wait, command, on_event, on_wait)


def stop(
    layout: Layout,
    name: str,
    *,
    wait: float = 0.0,
    command: str = "stop",
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Outcome:
    """Stop the service until `start` or a deploy. Arguments and errors as `start`."""
    return _simple(layout, name, "stop", wait, command, on_event, on_wait)


def restart(
    layout: Layout,
    name: str,
    *,
    wait: float = 0.0,
    command: str = "restart",
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Outcome:
    """Stop and start the current release and wait for a real token. Arguments and errors as `start`."""
    return _simple(layout, name, "restart", wait, command, on_event, on_wait)


def run_request(
    session: Session, request: Request, on_event: Callable[[Event], None] | None = None
) -> Outcome:
    """Begin a transaction under a lock that is held, watch it to its end, return its outcome.

    Raises:
        ToolkitError: it cannot be begun.
    """
    folder = begin(session.host.layout, session.host.name, request)
    try:
        for event in follow(folder):
            if on_event is not None:
                on_event(event)
    except StoppedWatchingError:
        raise StoppedWatchingError(
            f"interrupted; the {request.kind} goes on on the host by itself",
            hint=f"ddtoolkit status {session.host.name}",
        ) from None
    outcome = result(folder)
    if outcome is None:
        raise ToolkitError(
            f"{session.host.name}: the transaction has no outcome yet", hint="ddtoolkit status"
        )
    return outcome


def _simple(
    layout: Layout,
    name: str,
    kind: Kind,
    wait: float,
    command: str,
    on_event: Callable[[Event], None] | None,
    on_wait: Callable[[str], None] | None,
) -> Outcome:
    _subject(ServiceHost(layout, name), kind)
    stopping = kind == "stop"
    with hold(
        layout, name, command, wait=wait, on_event=on_event, on_wait=on_wait, stopping=stopping
    ) as session:
        release = _subject(session.host, kind)
        runs = session.host.process_status().active
        idle = stopping and not runs and stopped_on_request(session.host.paths)
        request = Request(kind=kind, who=whoami(), command=command, release=release, recorded=not idle)
        return _mention_full_disk(session.host, run_request(session, request, on_event))


def _mention_full_disk(host: ServiceHost, outcome: Outcome) -> Outcome:
    if host.reserve.whole:
        return outcome
    message = f"{outcome.message}; the disk under {host.paths.state} is full"
    hint = outcome.hint or f"free some space there; ddtoolkit status {host.name}"
    return replace(outcome, message=message, hint=hint)


def _subject(host: ServiceHost, kind: Kind) -> str | None:
    """Id of the release that is to be started or stopped; what serves can be stopped without being current.

    Raises:
        ConfigError: there is none.
    """
    current = host.store.current()
    if current is not None:
        return current.id
    process = host.process_status()
    if kind == "stop" and process.active:
        return process.release
    raise ConfigError(f"{host.name}: nothing is deployed", hint=f"ddtoolkit deploy profile {host.name}")
