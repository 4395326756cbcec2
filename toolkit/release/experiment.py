"""The record of a running experiment: a release that returns to its base by itself."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from toolkit.files import json_bytes, read_json, replace_file
from toolkit.layout import ServicePaths
from toolkit.release.request import Acceptance
from toolkit.service.processes import ProcessId

_FILE = "experiment.json"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A release on trial.

    Attributes:
        release: id of the release on trial.
        base: id of the release that it returns to.
        who: `user@host`.
        started: seconds since the epoch.
        until: when it returns, seconds since the epoch.
        keep_releases: releases that pruning leaves.
        base_acceptance: run and reported after the return.
        timer: process that waits for `until`.
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
        """Seconds left."""
        return max(self.until - time.time(), 0.0)

    @property
    def ends(self) -> str:
        """What becomes of it by itself, and when, in words."""
        try:
            when = f"{datetime.fromtimestamp(self.until, UTC):%Y-%m-%d %H:%M:%SZ}"
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
    """Record the process that waits for the end of `experiment`."""
    timed = replace(experiment, timer=timer.to_json())
    write_experiment(paths, timed)
    return timed


def forget_experiment(paths: ServicePaths) -> None:
    """End the record; a timer that waits for it goes away by itself."""
    (paths.state / _FILE).unlink(missing_ok=True)
