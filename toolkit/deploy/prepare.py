"""Observing this machine and planning a deploy; nothing is changed here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.build.builder import checkpoint_marks
from toolkit.build.environment import Environment, damage
from toolkit.build.for_profile import environment_of, lacking
from toolkit.drift.find import find
from toolkit.errors import ConfigError, ToolkitError
from toolkit.plan.finding import Drift
from toolkit.plan.steps import CurrentRelease, Desired, Observed, Plan, make_plan
from toolkit.profile.loading import ResolvedProfile, differences, profile_from_data
from toolkit.profile.schema import Profile, SecretRef
from toolkit.profile.secrets import SECRETS, resolve_secret
from toolkit.provision.lacks import missing
from toolkit.provision.requirements import Requirements, requirements
from toolkit.release import history
from toolkit.release.host import ServiceHost
from toolkit.release.locate import Deployed, layout_of
from toolkit.release.losing import loss_of
from toolkit.release.store import Release
from toolkit.release.trial import trial_of
from toolkit.release.under_way import unsettled
from toolkit.service import ports
from toolkit.service.secrets import stored_secrets
from toolkit.weights import wanted as weights

_SYSTEMD_RUNS = Path("/run/systemd/system")  # sd_booted(3)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned deploy.

    Attributes:
        resolved: the profile with its origins.
        service: name and place.
        host: releases, lock and service manager.
        needed: what the host needs.
        environment: the engine's environment.
        current: the current release, None before the first deploy.
        plan: what is to be done.
        sources: the files that the profile was read from, kept with the release.
        drifts: how the host differs from what was deployed.
        weights: names of the checkpoints that have to come.
    """

    resolved: ResolvedProfile
    service: Deployed
    host: ServiceHost
    needed: Requirements
    environment: Environment
    current: Release | None
    plan: Plan
    sources: dict[str, bytes]
    drifts: Sequence[Drift] = ()
    weights: Sequence[str] = ()

    @property
    def profile(self) -> Profile:
        """The profile to deploy."""
        return self.resolved.profile

    @property
    def current_id(self) -> str | None:
        """Id of the current release."""
        return None if self.current is None else self.current.id


def prepare(
    resolved: ResolvedProfile,
    *,
    sources: dict[str, bytes] | None = None,
    given: Mapping[str, str] | None = None,
) -> Prepared:
    """Observe this machine and plan the deploy of a profile on it.

    Args:
        resolved: the profile.
        sources: the files that it was read from; None: they are read here.
        given: values of the secrets, by the server's name for each, where another machine reads them.

    Raises:
        ConfigError: the profile needs what this machine or this release of the toolkit cannot do.
        ToolkitError: the engine's libraries are not installed.
    """
    profile = resolved.profile
    _check_supported(resolved)
    service = Deployed(profile.name, layout_of(profile))
    host = ServiceHost(service.layout, service.name)
    needed = requirements(profile, service.layout)
    environment = environment_of(profile, service.layout)
    current = host.store.current()
    renewed = _renewed(profile, current, given)
    desired = Desired(
        resolved.data, environment, checkpoint_marks(profile, service.layout), renewed, resolved.given
    )
    missing_weights = weights.lacking(profile)
    missing_weights.require_space()
    observed = _observe(profile, host, needed, current, missing_weights.lines)
    plan = _foreseen(host, current, resolved.data, make_plan(service.name, desired, observed))
    if sources is None:
        sources = {source.path.name: source.path.read_bytes() for source in resolved.sources}
    return Prepared(
        resolved,
        service,
        host,
        needed,
        environment,
        current,
        plan,
        sources,
        observed.drifts,
        missing_weights.folders,
    )


def _foreseen(host: ServiceHost, current: Release | None, data: Mapping[str, Any], plan: Plan) -> Plan:
    """The plan, with what a running experiment failed in already where its new release keeps that."""
    trial = trial_of(host, current)
    if trial is None or current is None or not plan.has("release"):
        return plan
    try:
        changes = differences(host.store.get(trial.base).profile, data)
    except ToolkitError:
        return plan  # a damaged base: the transaction says so
    loss = loss_of(host, current, changes)
    return plan if loss is None else replace(plan, notes=(*plan.notes, loss.line), loses=loss.certain)


def _renewed(profile: Profile, current: Release | None, given: Mapping[str, str] | None) -> list[str]:
    """Keys of the secrets that are others now than when the current release was started."""
    if current is None:
        return []
    try:
        stored = stored_secrets(current.unit)
    except ToolkitError:
        return []  # a damaged release is replaced whatever its secrets are
    found = []
    for key in SECRETS:
        reference: SecretRef | None = getattr(profile.service, key)
        name = key.replace("_", "-")
        known = stored.get(name)
        if reference is None or known is None:
            continue
        try:
            value = resolve_secret(reference).reveal() if given is None else given.get(name, known)
        except ConfigError:
            continue  # a deploy that needs it will say so
        if value != known:
            found.append(f"service.{key}")
    return found


def _observe(
    profile: Profile,
    host: ServiceHost,
    needed: Requirements,
    current: Release | None,
    missing_weights: Sequence[str],
) -> Observed:
    status = host.process_status()
    held = None
    if not status.active:
        held = ports.busy(profile.service.bind, profile.service.port) or None
    release, wrong = _read_release(current)
    changing = unsettled(host)
    settled = release is not None and wrong is None and changing is None
    trial = trial_of(host, current)
    return Observed(
        damage=wrong,
        missing=missing(needed),
        release=release,
        state=status.state,
        foreign_port=held,
        load_seconds=last_load_seconds(host),
        unsettled=changing,
        libraries=lacking(profile, host.layout),
        weights=missing_weights,
        drifts=find(Deployed(host.name, host.layout), None) if settled else (),
        trial=None if trial is None else trial.base,
        trial_ends="" if trial is None else trial.ends,
        tried=() if trial is None else sorted(trial.keys),
    )


def _read_release(current: Release | None) -> tuple[CurrentRelease | None, str | None]:
    """The current release, or what is wrong with it: a damaged one is replaced, not a reason to stop."""
    if current is None:
        return None, None
    try:
        release = CurrentRelease(
            current.id, current.profile, current.manifest, current.swapped, current.given
        )
        profile_from_data(release.profile)
        environment = Path(release.manifest["environment"]["path"])
    except ToolkitError as error:
        return None, f"the current release is damaged: {error.message}"
    except (KeyError, TypeError):
        return None, f"the current release is damaged: {current.path / 'manifest.json'}"
    why = damage(environment)
    return release, None if why is None else f"its environment {why}"


def last_load_seconds(host: ServiceHost) -> float | None:
    """Seconds without a server in the last change that restarted it, None when there was none."""
    for entry in reversed(history.read(host.paths)):
        # A test and a change that was undone restart more than once.
        if entry.kind != "test" and entry.outcome == "committed" and "downtime" in entry.seconds:
            return float(entry.seconds["downtime"])
    return None


def _check_supported(resolved: ResolvedProfile) -> None:
    profile = resolved.profile
    if profile.service.manager != "systemd":
        return
    if not _SYSTEMD_RUNS.is_dir():
        again = f"{resolved.given.deploy(profile.name)} -i INVENTORY"
        raise ConfigError(
            "service.manager 'systemd': this machine is not run by systemd",
            hint=f"{again} deploys it on the hosts that it is for; "
            "--set service.manager=process --set host.user=null serves from this machine",
        )
    if os.geteuid() != 0:
        raise ConfigError(
            "service.manager 'systemd' takes root: units, releases and state belong to root",
            hint=f"sudo {resolved.given.deploy(profile.name)}",
        )
