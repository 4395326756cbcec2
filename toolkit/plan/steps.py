"""The steps that lead from what is observed to what is desired, each with its reasons."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from toolkit.build.environment import Environment
from toolkit.plan.finding import Drift, Mend
from toolkit.profile.changes import Change, shown
from toolkit.profile.given import Given
from toolkit.profile.loading import differences
from toolkit.profile.recorded import restarts

Action = Literal[
    "provision",
    "repair",
    "wheels",
    "libraries",
    "weights",
    "build",
    "release",
    "record",
    "restart",
    "start",
    "acceptance",
]


@dataclass(frozen=True, slots=True)
class CurrentRelease:
    """The release that is to serve now.

    Attributes:
        id: release id.
        profile: its resolved profile, JSON form.
        manifest: its build manifest.
        swapped: keys whose values came from a swap and not from a deploy.
        given: what its deploy was asked for.
    """

    id: str
    profile: Mapping[str, Any]
    manifest: Mapping[str, Any]
    swapped: tuple[str, ...] = ()
    given: Given = field(default_factory=Given)


@dataclass(frozen=True, slots=True)
class Desired:
    """What a deploy asks for.

    Attributes:
        profile: the resolved profile, JSON form.
        environment: the engine's environment.
        checkpoints: size, mtime and inode of the checkpoints' files.
        renewed: keys of secrets whose values are not those that the current release was started with.
        given: what this deploy is asked for.
    """

    profile: Mapping[str, Any]
    environment: Environment
    checkpoints: Mapping[str, Any]
    renewed: Sequence[str] = ()
    given: Given = field(default_factory=Given)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a host shows.

    Attributes:
        missing: what the host lacks, a line each.
        release: the current release, None before the first deploy.
        state: state of the service as the service manager tells it.
        foreign_port: what else holds the service's port, None when it is free or the service's own.
        load_seconds: how long the last start took, None when unknown.
        damage: what is wrong with the current release on disk, None when nothing is.
        unsettled: a change that runs or was interrupted, in words; None without one.
        libraries: what has to be installed for the engine, in words; None when nothing has.
        weights: checkpoints that have to come, a line each.
        drifts: how the host differs from what was deployed.
        trial: the release that the current one, an experiment, gives way to by itself; None without one.
        trial_ends: what becomes of that experiment by itself, and when, in words.
        tried: keys that it tries.
    """

    missing: Sequence[str] = ()
    release: CurrentRelease | None = None
    state: str = "stopped"
    foreign_port: str | None = None
    load_seconds: float | None = None
    damage: str | None = None
    unsettled: str | None = None
    libraries: str | None = None
    weights: Sequence[str] = ()
    drifts: Sequence[Drift] = ()
    trial: str | None = None
    trial_ends: str = ""
    tried: Sequence[str] = ()

    def drifted(self, mend: Mend) -> tuple[str, ...]:
        """The drifts that end in this way, a line each."""
        return tuple(str(drift) for drift in self.drifts if drift.mend == mend)


@dataclass(frozen=True, slots=True)
class Step:
    """One step and why it is needed."""

    action: Action
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered steps; empty when there is nothing to do.

    Attributes:
        service: name of the service.
        steps: what will happen, in order.
        changes: keys whose values differ from the current release's.
        undone_swaps: swapped keys that this plan would set back.
        downtime: expected seconds without a server, None when unknown, 0.0 without a restart.
        notes: what is to be known besides.
        by_hand: drifts that no deploy ends, each with the next step.
        experiment: what becomes of a running experiment by itself, in words; "" without one.
        tried: keys that it tries.
        lost: options that the current release was deployed with and this deploy lacks, where that shows.
        loses: by what a running experiment was found to be already, the new release would be undone.
    """

    service: str
    steps: tuple[Step, ...]
    changes: tuple[Change, ...] = ()
    undone_swaps: tuple[Change, ...] = ()
    downtime: float | None = 0.0
    notes: tuple[str, ...] = field(default=())
    by_hand: tuple[str, ...] = field(default=())
    experiment: str = ""
    tried: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    loses: bool = False

    @property
    def empty(self) -> bool:
        """Whether a deploy has nothing to do."""
        return not self.steps

    def has(self, action: Action) -> bool:
        """Whether a step of this kind is in the plan."""
        return any(step.action == action for step in self.steps)

    @property
    def undone(self) -> list[str]:
        """What it would set back, for people, a line each."""
        tried = f" (an experiment, which {self.experiment})"
        return [
            _difference(change) + (tried if change.key in self.tried else "") for change in self.undone_swaps
        ]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"empty": self.empty}


def make_plan(service: str, desired: Desired, observed: Observed) -> Plan:
    """Compare desired with observed state.

    The steps come in the order in which they run. A changed environment or checkpoint, or a changed key that
    the server depends on, makes a new release and one restart; other keys are put on record. An unchanged
    profile whose service is down only starts it. Where the host has drifted, that is set right by the least
    that does it.
    """
    steps = []
    if observed.missing:
        steps.append(Step("provision", tuple(observed.missing)))
    if repairs := observed.drifted("repair"):
        steps.append(Step("repair", repairs))
    if observed.libraries is not None:
        steps.append(Step("libraries", (observed.libraries,)))
    if observed.weights:
        steps.append(Step("weights", tuple(observed.weights)))
    build = _build_reasons(desired, observed)
    if build:
        steps.append(Step("build", build))
    changes = tuple(differences(observed.release.profile, desired.profile)) if observed.release else ()
    served = changes if build or observed.trial or restarts(changes) else ()
    release = _release_reasons(observed.release, served, build, damaged=observed.damage is not None)
    if observed.release is not None:
        release += tuple(f"{key} has a new value" for key in desired.renewed)
        release += observed.drifted("release")
        if observed.trial and not release:
            release = (f"what runs is an experiment, which would give way to {observed.trial}",)
    if changes and not release:
        steps.append(Step("record", tuple(map(_difference, changes))))
    elif not release and (given := _given_anew(desired, observed)):
        steps.append(Step("record", given))
    steps += _serving(desired, observed, release)
    restarted = any(step.action == "restart" for step in steps)
    return Plan(
        service=service,
        steps=tuple(steps),
        changes=changes,
        undone_swaps=_undone(observed.release, desired, changes),
        downtime=observed.load_seconds if restarted else 0.0,
        notes=(observed.unsettled,) if observed.unsettled else (),
        experiment=observed.trial_ends,
        tried=tuple(observed.tried),
        lost=() if observed.release is None else _lost(observed.release, desired, changes),
        by_hand=tuple(f"{drift}; next: {drift.fix}" for drift in observed.drifts if drift.mend == "hand"),
    )


def _serving(desired: Desired, observed: Observed, release: tuple[str, ...]) -> list[Step]:
    """What brings the asked release to serve."""
    running = observed.state in ("running", "starting")
    if release:
        return [
            Step("release", release),
            Step("restart" if running else "start", (_start_reason(observed, running=running),)),
            Step("acceptance", (f"level {desired.profile['acceptance']['level']}",)),
        ]
    if not running:
        return [Step("start", (f"the service is {observed.state}",))]
    drifted = observed.drifted("restart")
    return [Step("restart", drifted)] if drifted else []


def _start_reason(observed: Observed, *, running: bool) -> str:
    if running:
        return "the new release replaces the one that runs"
    if observed.release is None and observed.damage is None:
        return "first release, nothing serves yet"
    return "the service does not run"


def _build_reasons(desired: Desired, observed: Observed) -> tuple[str, ...]:
    release = observed.release
    if observed.damage is not None:
        return (observed.damage,)
    if release is None:
        return ("nothing is built yet",)
    reasons = desired.environment.differences(release.manifest.get("environment", {}))
    marks = release.manifest.get("checkpoints", {})
    roles = sorted({*marks, *desired.checkpoints})
    reasons += [
        f"the {role} checkpoint changed" for role in roles if marks.get(role) != desired.checkpoints.get(role)
    ]
    if observed.weights and not reasons:
        reasons = ["its weights come anew"]
    return (*reasons, *observed.drifted("build"))


def _release_reasons(
    release: CurrentRelease | None, changes: Sequence[Change], build: Sequence[str], *, damaged: bool
) -> tuple[str, ...]:
    if release is None:
        return tuple(build) if damaged else ("first deploy of this service",)
    return tuple(map(_difference, changes)) or tuple(build)


def _difference(change: Change) -> str:
    return f"{change.key}: {shown(change.old)} -> {shown(change.new)}"


def _lost(release: CurrentRelease, desired: Desired, changes: Sequence[Change]) -> tuple[str, ...]:
    return release.given.lost(desired.given, [change.key for change in changes])


def _given_anew(desired: Desired, observed: Observed) -> tuple[str, ...]:
    """Why what the deploy was given goes on record, although no value differs; nothing where it is there."""
    release, reasons = observed.release, []
    if release is None or observed.trial:
        return ()
    if not desired.given.lays_the_same(release.given):
        options = shlex.join(desired.given.options)
        reasons.append(f"deployed with {options}" if options else "deployed without overlay and --set")
    if release.swapped:
        reasons.append(f"{', '.join(release.swapped)}: swapped before, and deployed now")
    return tuple(reasons)


def _undone(
    release: CurrentRelease | None, desired: Desired, changes: Sequence[Change]
) -> tuple[Change, ...]:
    """Swapped keys that get another value without being named."""
    swapped = set(release.swapped) if release else set()
    return tuple(
        change for change in changes if change.key in swapped and not desired.given.sets_key(change.key)
    )


def describe(changes: Sequence[Change]) -> list[str]:
    """A diff for people, a line a key."""
    return [f"{change.key}: {shown(change.old)} -> {shown(change.new)}" for change in changes]
