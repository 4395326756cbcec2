"""The record of a running experiment: a release that returns to its base by itself."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from toolkit.files import json_bytes, read_json, replace_file
from toolkit.layout import ServicePaths
from toolkit.release.request import Acceptance
from toolkit.service.processes import ProcessId, boot_id, since_boot

_FILE = "experiment.json"
_ASIDE = "experiment-aside.json"
_SAME = 2.0  # seconds by which the two clocks may differ without being told


@dataclass(frozen=True, slots=True)
class Experiment:
    """A release on trial.

    Attributes:
        release: id of the release on trial.
        base: id of the release that it returns to.
        who: `user@host`.
        started: seconds since the epoch.
        until: when it returns, seconds since the epoch, by the clock as it was set at the time.
        keep_releases: releases that pruning leaves.
        base_acceptance: run and reported after the return.
        timer: process that waits for the end; with it `deadline`, in seconds after the boot (CLOCK_BOOTTIME),
            for the clock may be set meanwhile; `rough` where the clock alone told it, after a reboot.
    """

    release: str
    base: str
    who: str
    started: float
    until: float
    keep_releases: int = 5
    base_acceptance: Acceptance | None = None
    timer: dict[str, Any] | None = None

    @property
    def timed(self) -> bool:
        """Whether the process that will end it is alive."""
        process = ProcessId.from_json(self.timer)
        return process is not None and process.alive()

    @property
    def remaining(self) -> float:
        """Seconds left, by the clock that nobody sets; after a reboot by the other one, within its time."""
        by_clock = min(max(self.until - time.time(), 0.0), max(self.until - self.started, 0.0))
        deadline = self._deadline
        if deadline is None:
            return by_clock
        left = max(deadline - since_boot(), 0.0)
        return min(left, by_clock) if (self.timer or {}).get("rough") else left

    @property
    def end(self) -> float:
        """When it returns, seconds since the epoch by the clock as it is set now."""
        end = time.time() + self.remaining
        return self.until if abs(end - self.until) < _SAME else end

    @property
    def _deadline(self) -> float | None:
        timer = self.timer if isinstance(self.timer, dict) else {}
        deadline = timer.get("deadline")
        if isinstance(deadline, int | float) and timer.get("boot") == boot_id():
            return float(deadline)
        return None

    @property
    def ends(self) -> str:
        """What becomes of it by itself, and when, in words."""
        try:
            when = f"{datetime.fromtimestamp(self.end, UTC):%Y-%m-%d %H:%M:%SZ}"
        except (OverflowError, ValueError, OSError, TypeError):
            when = "an unknown time"  # the file was damaged
        return f"returns to {self.base} at {when}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def read_experiment(paths: ServicePaths) -> Experiment | None:
    """The running experiment; None without one."""
    value = read_json(paths.state / _FILE)
    if not isinstance(value, dict):
        return None
    try:
        acceptance = value.get("base_acceptance")
        if acceptance is not None:
            acceptance = Acceptance(**{**acceptance, "command": tuple(acceptance["command"])})
        return Experiment(**{**value, "base_acceptance": acceptance})
    except (TypeError, KeyError):
        return None


def write_experiment(paths: ServicePaths, experiment: Experiment) -> None:
    """Record `experiment`.

    Raises:
        OSError: the disk is full.
    """
    replace_file(paths.state / _FILE, json_bytes(experiment.to_json()))


def set_timer(paths: ServicePaths, experiment: Experiment, timer: ProcessId) -> Experiment:
    """Record the process that waits for the end of `experiment`, and the end by its clock."""
    before = experiment.timer or {}
    # One that was just begun has its whole time; after a reboot the clock alone tells what is left.
    rough = bool(before.get("rough")) if before.get("boot") == timer.boot else bool(before)
    timed = replace(experiment, timer=_timed(timer.to_json(), experiment.remaining, rough=rough))
    write_experiment(paths, timed)
    return timed


def prolong(paths: ServicePaths, experiment: Experiment, seconds: float) -> Experiment:
    """Let `experiment` return so long from now.

    Raises:
        OSError: the disk is full.
    """
    timer = None if experiment.timer is None else _timed(experiment.timer, seconds, rough=False)
    longer = replace(experiment, until=time.time() + seconds, timer=timer)
    write_experiment(paths, longer)
    return longer


def _timed(timer: dict[str, Any], seconds: float, *, rough: bool) -> dict[str, Any]:
    return {**timer, "deadline": round(since_boot() + seconds, 3), "rough": rough}


def set_aside(paths: ServicePaths) -> None:
    """Take the record out of the way of a change that may come to nothing; its timer goes away by itself."""
    try:
        (paths.state / _FILE).replace(paths.state / _ASIDE)
    except FileNotFoundError:
        drop_aside(paths)  # of an earlier change


def take_back(paths: ServicePaths, release: str) -> Experiment | None:
    """What was set aside, on record again where it is this release that is on trial; may be repeated."""
    with contextlib.suppress(FileNotFoundError):
        (paths.state / _ASIDE).replace(paths.state / _FILE)
    experiment = read_experiment(paths)
    if experiment is not None and experiment.release == release:
        return experiment
    forget_experiment(paths)
    return None


def drop_aside(paths: ServicePaths) -> None:
    """Forget what was set aside."""
    (paths.state / _ASIDE).unlink(missing_ok=True)


def forget_experiment(paths: ServicePaths) -> None:
    """End the record; a timer that waits for it goes away by itself."""
    (paths.state / _FILE).unlink(missing_ok=True)
