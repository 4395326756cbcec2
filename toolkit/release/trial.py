"""The experiment that a service runs: which keys it tries, what a change of it is held against, its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from toolkit.errors import ToolkitError
from toolkit.profile.changes import Change, shown
from toolkit.profile.loading import differences
from toolkit.release.ending import end_record
from toolkit.release.experiment import Experiment, prolong, read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.lock import whoami
from toolkit.release.request import Outcome, Request
from toolkit.release.store import Release
from toolkit.spans import in_words


@dataclass(frozen=True, slots=True)
class Trial:
    """An experiment whose release is the current one.

    Attributes:
        base: id of the release that it returns to.
        ends: when it does, in words.
        keys: keys of the profile that are tried.
    """

    base: str
    ends: str
    keys: frozenset[str]


def trial_of(host: ServiceHost, current: Release | None) -> Trial | None:
    """The experiment that the current release is; None where it is none."""
    experiment = _running(host, current)
    if experiment is None or current is None:
        return None
    try:
        changes = differences(host.store.get(experiment.base).profile, current.profile)
    except ToolkitError:
        changes = []  # a damaged base: the return says so
    keys = frozenset(change.key for change in changes)
    return Trial(experiment.base, experiment.ends, keys)


@dataclass(frozen=True, slots=True)
class Longer:
    """What a swap comes to that asks an experiment for what it tries already.

    Attributes:
        line: how its end would be moved, for the diff; None where no time was named.
        advice: what runs, until when, and what to do about it.
    """

    line: str | None
    advice: str


def longer(host: ServiceHost, current: Release, sets: Sequence[str], seconds: float | None) -> Longer | None:
    """What is to be told or done where nothing is changed by `sets`; None where they are not on trial.

    Args:
        host: the service.
        current: the current release.
        sets: `key.path=value`, as they are already.
        seconds: time from now until it returns; None where none was named.
    """
    trial, experiment = trial_of(host, current), _running(host, current)
    asked = [item.partition("=")[0].strip() for item in sets]
    if trial is None or experiment is None or not any(_within(key, asked) for key in trial.keys):
        return None
    line = None
    if seconds is not None:
        until = f"{datetime.fromtimestamp(time.time() + seconds, UTC):%Y-%m-%d %H:%M:%SZ}"
        line = f"the experiment {experiment.ends} -> at {until}"
    name = host.name
    advice = (
        f"{', '.join(sorted(trial.keys))}: tried already, by an experiment that {experiment.ends} "
        f"(in {in_words(experiment.remaining)}); the same with --for TIME lets it run so long from now, the "
        f"same without --experiment keeps it, ddtoolkit rollback {name} ends it"
    )
    return Longer(line, advice)


def overtaken(host: ServiceHost, current: Release, changes: Sequence[Change], *, tries: bool) -> str | None:
    """What a swap makes of the experiment that runs, in a line; None where none does.

    Args:
        host: the service.
        current: the current release.
        changes: of the swap, which restarts: against the experiment's base; with `tries` against `current`.
        tries: the swap is an experiment, too.
    """
    experiment = _running(host, current)
    if experiment is None:
        return None
    try:
        tried = differences(host.store.get(experiment.base).profile, current.profile)
    except ToolkitError:
        tried = []  # a damaged base: the transaction says so
    new = {change.key: change.new for change in changes}
    kept = [item for item in tried if (tries if item.key not in new else new[item.key] == item.new)]
    values = ", ".join(f"{item.key}={shown(item.new)}" for item in kept) or "none of its values"
    left = f"which has {in_words(experiment.remaining)} left and would return to {experiment.base}"
    which = f"the experiment of {experiment.who}, {left}"
    if tries:
        return f"this takes the place of {which}; still tried: {values}"
    return f"this ends {which}, from which the changes are told; made permanent by it: {values}"


def go_on(host: ServiceHost, current: Release, command: str, seconds: float) -> Outcome:
    """Let the running experiment return `seconds` from now; the caller holds the lock.

    Raises:
        ToolkitError: it has ended meanwhile, or the disk is full.
    """
    experiment = _running(host, current)
    if experiment is None:
        raise ToolkitError(f"{host.name}: the experiment has ended", hint="the same command again begins it")
    begin = time.monotonic()
    request = Request("record", whoami(), command, current.id, current.id)
    try:
        ends = prolong(host.paths, experiment, seconds).ends
    except OSError as error:
        said = f"{host.paths.state}: the experiment's end cannot be written: {error.strerror}"
        raise ToolkitError(said, hint="free some space; it ends when it was to end before") from error
    message = f"{current.id} goes on, an experiment that {ends}; nothing was restarted"
    return end_record(host, request, message, begin)


def _running(host: ServiceHost, current: Release | None) -> Experiment | None:
    experiment = read_experiment(host.paths)
    return experiment if current is not None and experiment and experiment.release == current.id else None


def _within(key: str, asked: Sequence[str]) -> bool:
    """Whether a key is among those asked for, or part of one that is."""
    return any(key == item or key.startswith((f"{item}.", f"{item}[")) for item in asked)
