"""The experiment that a service runs: which keys it tries, and what a change of it is held against."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import ToolkitError
from toolkit.profile.loading import differences
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release


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
    experiment = read_experiment(host.paths)
    if experiment is None or current is None or experiment.release != current.id:
        return None
    try:
        changes = differences(host.store.get(experiment.base).profile, current.profile)
    except ToolkitError:
        changes = []  # a damaged base: the return says so
    keys = frozenset(change.key for change in changes)
    return Trial(experiment.base, experiment.ends, keys)
