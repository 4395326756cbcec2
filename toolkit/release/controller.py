"""The controlling side: takes the lock, starts a transaction, watches it. It may die at any time."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.files import json_bytes, read_bytes, write_new
from toolkit.layout import Layout
from toolkit.release.claims import claim
from toolkit.release.experiment import read_experiment
from toolkit.release.host import HOST_FILE, ServiceHost, read_host
from toolkit.release.journal import JOURNAL_FILE, Event, create_journal, read_journal
from toolkit.release.launches import write_launches
from toolkit.release.leavings import clear
from toolkit.release.lock import LockInfo
from toolkit.release.recovery_unit import install_recovery
from toolkit.release.request import RELEASING, REQUEST_FILE, Kind, Outcome, Request, read_request
from toolkit.release.run import CRASH_FILE, concluded
from toolkit.release.spawn import spawn, spawn_timer, under_systemd
from toolkit.release.store import prepare_layout
from toolkit.release.transaction import BASE_SETTINGS_FILE, SETTINGS_FILE
from toolkit.service.secrets import write_secrets

_POLL = 0.02
_LOOK = 0.2  # seconds between looks at what does not tell of a change
_GONE_AFTER = 2.0
# What writes a report may fail on a full disk, so it is refused there; these may not be.
_NEEDING_NO_SPACE: frozenset[Kind] = frozenset({"start", "stop", "restart", "return"})


@dataclass(frozen=True, slots=True)
class Session:
    """A service that this process may change.

    Attributes:
        host: the service.
        taken_over: the stale holder whose lock was taken over.
        recovered: outcome of an interrupted transaction that was finished or reversed first.
    """

    host: ServiceHost
    taken_over: LockInfo | None = None
    recovered: Outcome | None = None


@contextmanager
def hold(
    layout: Layout,
    name: str,
    command: str,
    *,
    wait: float = 0.0,
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
    keep_timer: bool = False,
    stopping: bool = False,
) -> Iterator[Session]:
    """Hold the service's lock for the body; an interrupted transaction is finished or reversed first.

    Args:
        layout: where things lie.
        name: name of the service.
        command: what is done, shown to others.
        wait: seconds to wait for another holder.
        on_event: called with each event of a recovery.
        on_wait: called with a line on whom is waited for, and how long yet.
        keep_timer: leave a dead experiment timer alone (the timer's own use).
        stopping: the service is to be stopped: a recovery starts nothing.

    Raises:
        LockedError: another holder is alive, or a transaction runs.
        ToolkitError: the service's folders cannot be created, or a recovery cannot be started.
    """
    host = ServiceHost(layout, name)
    if (reserved := _reserved.get(host.paths.lock)) is not None:
        yield reserved
        return
    prepare_layout(layout.root, host.paths)
    try:
        with host.lock.hold(command, wait=wait, on_wait=on_wait) as held:
            host.reserve.fill()
            recovered = _recover(host, on_event, stopping=stopping)
            clear(host)
            if not keep_timer:
                _revive_timer(host)
            yield Session(host, held.taken_over, recovered)
    finally:
        host.reserve.fill()


_reserved: dict[Path, Session] = {}


@contextmanager
def reserve(
    layout: Layout,
    name: str,
    command: str,
    *,
    wait: float = 0.0,
    on_event: Callable[[Event], None] | None = None,
    on_wait: Callable[[str], None] | None = None,
    deploys: bool = False,
    stopping: bool = False,
) -> Iterator[None]:
    """Hold the lock over several uses of `hold` in this process, so that nothing changes in between.

    A service that was never deployed has no lock and nothing that could change: who deploys it claims it, so
    that nobody else does at the same time. Further arguments and errors as `hold`.
    """
    end, host = time.monotonic() + wait, ServiceHost(layout, name)
    with contextlib.ExitStack() as held:
        if deploys and host.store.current() is None:
            held.enter_context(claim(layout, name, command, wait=wait, on_wait=on_wait))
        if not host.paths.base.is_dir():
            yield
            return
        left = max(end - time.monotonic(), 0.0)
        locked = hold(layout, name, command, wait=left, on_event=on_event, on_wait=on_wait, stopping=stopping)
        session = held.enter_context(locked)
        _reserved[session.host.paths.lock] = session
        try:
            yield
        finally:
            del _reserved[session.host.paths.lock]


def is_reserved(layout: Layout, name: str) -> bool:
    """Whether this process keeps the service's lock over several uses of `hold`."""
    return ServiceHost(layout, name).paths.lock in _reserved


def begin(layout: Layout, name: str, request: Request) -> Path:
    """Start the transaction in a detached process; the caller holds the lock.

    A request whose base is an experiment gets the base of that experiment instead.

    Returns:
        The folder to `follow`.

    Raises:
        LockedError: a transaction runs.
        ToolkitError: the disk is full, or the process cannot be started; nothing was changed.
    """
    host = ServiceHost(layout, name)
    request = _with_base(host, request)
    folder = host.paths.transaction
    staging, former = folder.with_name("transaction.new"), folder.with_name("transaction.old")
    if unfinished(folder):
        raise ToolkitError(f"{name}: an interrupted transaction is to be recovered first")
    try:
        shutil.rmtree(former, ignore_errors=True)
        if request.kind in _NEEDING_NO_SPACE:
            host.reserve.write("transaction", lambda: _write_transaction(host, request, staging))
        else:
            _write_transaction(host, request, staging)
        if folder.exists():
            folder.rename(former)
        staging.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        said = f"{folder}: cannot prepare the transaction: {error.strerror}"
        raise ToolkitError(said, hint="free some space; nothing was changed") from error
    _spawn(folder, recover=False)
    return folder


def follow(folder: Path, seen: int = 0) -> Iterator[Event]:
    """Events of the transaction in `folder`, as they come, to its outcome, without the first that were seen.

    Where its processes die without one, the last event is `interrupted`; the next `hold` recovers.
    """
    host = read_host(folder)
    quiet_since = time.monotonic()
    for _ in _changes(folder / JOURNAL_FILE):
        running = host.lock.transaction_running()  # it frees its flock once its outcome is written
        events = read_journal(folder)
        for event in events[seen:]:
            if event.step == "outcome":
                _wait_free(host)
                yield event
                return
            yield event
        if len(events) > seen or running:
            quiet_since = time.monotonic()
        seen = len(events)
        if time.monotonic() - quiet_since > _GONE_AFTER:
            yield Event("interrupted", "failed", "the transaction's process died")
            return


def _changes(file: Path) -> Iterator[None]:
    """At once, whenever `file` was written since, and now and then besides, for ever."""
    while True:
        written, looked = _written(file), time.monotonic()
        yield
        while _written(file) == written and time.monotonic() - looked < _LOOK:
            time.sleep(_POLL)


def _written(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def unfinished(folder: Path) -> bool:
    """Whether a transaction was begun there and has no outcome."""
    return (folder / REQUEST_FILE).is_file() and not concluded(folder)


def _crash(folder: Path) -> str:
    """What ended the process, when it could still say so."""
    try:
        lines = read_bytes(folder / CRASH_FILE).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return f" ({lines[-1]})" if lines else ""


def _wait_free(host: ServiceHost) -> None:
    """Let the process of a concluded transaction go, so that the next one finds the flock free."""
    end = time.monotonic() + _GONE_AFTER
    while host.lock.transaction_running() and time.monotonic() < end:
        time.sleep(_POLL / 2)


def result(folder: Path) -> Outcome | None:
    """The outcome of the transaction in `folder`; None while it runs.

    A transaction whose processes died has the status `interrupted`.
    """
    host = read_host(folder)
    running = host.lock.transaction_running()  # asked first: it ends with its outcome in the journal
    for event in read_journal(folder):
        if event.step == "outcome":
            return Outcome.from_json(event.data)
    if running:
        return None
    request = read_request(folder)
    return Outcome(
        status="interrupted",
        message=f"the transaction's process died{_crash(folder)}; the next command finishes or reverses it",
        kind=request.kind,
        release=request.release,
        base=request.base,
        hint=f"ddtoolkit status {host.name}",
        transaction=request.id,
    )


def _with_base(host: ServiceHost, request: Request) -> Request:
    """What replaces an experiment falls back to the experiment's own base, which was accepted in full."""
    experiment = read_experiment(host.paths)
    if (
        experiment is None
        or request.kind not in RELEASING
        or request.base != experiment.release
        or request.release == experiment.base
    ):
        return request
    return replace(request, base=experiment.base)


def _write_transaction(host: ServiceHost, request: Request, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    write_new(folder / HOST_FILE, json_bytes(host.to_json()))
    write_new(folder / REQUEST_FILE, json_bytes(request.to_json()))
    for name, acceptance in (
        (SETTINGS_FILE, request.acceptance),
        (BASE_SETTINGS_FILE, request.base_acceptance),
    ):
        if acceptance is not None:
            write_new(folder / name, json_bytes(acceptance.settings))
    if request.comparison is not None:
        write_launches(folder, request.comparison)
    create_journal(folder)


def _recover(
    host: ServiceHost, on_event: Callable[[Event], None] | None, *, stopping: bool
) -> Outcome | None:
    folder = host.paths.transaction
    if not unfinished(folder):
        return None
    seen = len(read_journal(folder))
    if on_event is not None:
        on_event(Event("recover", "begin", _interrupted(folder)))
    _spawn(folder, recover=True, stopping=stopping)
    for event in follow(folder, seen):
        if on_event is not None:
            on_event(event)
    return result(folder)


def _interrupted(folder: Path) -> str:
    """What is done before anything that was asked for."""
    try:
        request = read_request(folder)
    except ToolkitError:
        return "first an interrupted change is finished or reversed"
    return f"first the interrupted {request.kind} of {request.who} is finished or reversed"


def _revive_timer(host: ServiceHost) -> None:
    experiment = read_experiment(host.paths)
    if experiment is not None and not experiment.timed:
        with contextlib.suppress(ToolkitError):
            spawn_timer(host)


def _spawn(folder: Path, *, recover: bool, stopping: bool = False) -> None:
    options = ["--recover"] * recover + ["--stopping"] * stopping
    request = read_request(folder)
    releases = (request.release, request.base)
    host = read_host(folder)
    if not recover and under_systemd(host, *releases):
        install_recovery()
        _keep_secrets(host, request)
    if why := spawn(host, "transaction", "toolkit.release.run", str(folder), *options, releases=releases):
        raise ToolkitError(f"{folder}: the transaction cannot be started: {why}")


def _keep_secrets(host: ServiceHost, request: Request) -> None:
    """Read the secrets while the caller's environment is at hand; a unit of its own does not inherit it."""
    serving = request.kind == "start" and host.process_status().active
    if request.release is None or request.kind == "stop" or serving:
        return
    with contextlib.suppress(ToolkitError):  # the transaction meets it too, and puts it on record
        write_secrets(host.store.get(request.release).unit)
