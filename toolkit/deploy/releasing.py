"""A new release: provisioned, built, staged, and put into service by one transaction.

The transaction runs detached on the host; what is here only prepares it and watches it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.build.builder import build
from toolkit.build.environment import Environment
from toolkit.build.for_profile import environment_of, install, lacking
from toolkit.deploy.bases import bases_of
from toolkit.deploy.judging import Judging, acceptance_of, comparison_of
from toolkit.deploy.kept_secrets import with_kept_secrets
from toolkit.deploy.reuse import built_already, discard_changed, fits
from toolkit.deploy.swapped import Swapped
from toolkit.deploy.watcher import Watcher
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.changes import Change
from toolkit.profile.given import Given
from toolkit.profile.schema import Profile
from toolkit.provision.lacks import missing
from toolkit.provision.playbook import run_local
from toolkit.provision.requirements import Requirements, requirements
from toolkit.release.control import run_request
from toolkit.release.controller import Session
from toolkit.release.locate import Deployed
from toolkit.release.lock import whoami
from toolkit.release.request import Kind, Outcome, Request
from toolkit.release.store import Release, content_digest
from toolkit.service.command import release_unit
from toolkit.weights import wanted as weights


@dataclass(frozen=True, slots=True)
class NewRelease:
    """What a new release is to be.

    Attributes:
        kind: of the transaction.
        command: that asked for it, for the history.
        profile: what it serves.
        data: the profile as it is recorded.
        changes: of keys, against the release before.
        swapped: keys whose values come from swaps, and what the last deploy gave them.
        sources: files of the profile by name, as they were read.
        given: what the deploy was asked for.
        built: manifest of a build that was made ahead; None builds here.
    """

    kind: Kind
    command: str
    profile: Profile
    data: dict[str, Any]
    changes: Sequence[Change]
    swapped: Swapped
    sources: dict[str, bytes]
    given: Given
    built: dict[str, Any] | None = None


def release(
    session: Session,
    change: NewRelease,
    base: Release | None,
    watcher: Watcher,
    judging: Judging,
    given: Mapping[str, str] | None,
) -> Outcome:
    """Stage a release and put it into service; undone by itself when it is worse.

    Args:
        session: holds the lock.
        change: what it is to be.
        base: the current release; None where there is none.
        watcher: told of every step.
        judging: how it is judged.
        given: values of the secrets, where another machine reads them; else None.

    Raises:
        ConfigError: a secret has no value.
        ToolkitError: the build failed; nothing that serves was touched.
    """
    host = session.host
    environment = environment_of(change.profile, host.layout)
    manifest = change.built
    if manifest is None or not fits(manifest, environment):
        manifest = build_here(change.profile, environment, base, host.layout, watcher)
    release_id = host.store.new_id(content_digest(change.data, manifest))
    unit = release_unit(change.profile, manifest, host.store.path(release_id), host.layout)
    if given is not None:
        unit = with_kept_secrets(unit, base, given)
    watcher.step("release", f"staging {release_id}")
    release = host.store.stage(
        release_id,
        profile=change.data,
        unit=unit,
        manifest=manifest,
        sources=change.sources,
        changes=change.changes,
        swapped=change.swapped.keys,
        deployed=change.swapped.deployed,
        given=change.given,
    )
    comparison = None
    if change.profile.acceptance.level == "full" and judging.experiment_seconds is None:
        comparison = comparison_of(change.profile, release.path, manifest, host.layout)
    request = Request(
        kind=change.kind,
        who=whoami(),
        command=change.command,
        release=release.id,
        base=None if base is None else base.id,
        changes=tuple(change.changes),
        acceptance=acceptance_of(change.profile, unit, bases_of(host, base), judging),
        comparison=comparison,
        experiment_seconds=judging.experiment_seconds,
        keep_releases=change.profile.service.keep_releases,
    )
    return run_request(session, request, watcher.event)


def build_here(
    profile: Profile, environment: Environment, base: Release | None, layout: Layout, watcher: Watcher
) -> dict[str, Any]:
    """Have all on this machine that a release of the profile is made of; its manifest.

    Raises:
        ToolkitError: libraries, checkpoints or the build failed; nothing that serves was touched.
    """
    if (wanted := lacking(profile, layout)) is not None:
        watcher.step("libraries", wanted)
        install(profile, layout, watcher.line)
        environment = environment_of(profile, layout)
    weights.fetch(profile, watcher.step, watcher.line)
    watcher.step("build", "environment, checkpoint hashes, tuned values; what is there already is used")
    discard_changed(environment, layout)
    manifest = built_already(profile, environment, base)
    if manifest is not None:
        watcher.line("nothing that it depends on has changed: the build of the release before is used")
        return manifest
    return build(profile, environment, layout, on_progress=watcher.line)


def provision(profile: Profile, service: Deployed, watcher: Watcher) -> None:
    """Run the provision playbook on this machine.

    Raises:
        ToolkitError: a task failed.
    """
    watcher.step("provision", "folders, packages and free space, by Ansible")
    done = run_local(
        "provision.yml",
        requirements(profile, service.layout).settings(),
        on_task=lambda task: watcher.line(f"{task.task}: {task.outcome}"),
    )
    changed = [task.task for task in done if task.outcome == "changed"]
    watcher.line(f"changed: {', '.join(changed)}" if changed else "changed nothing")


def unprovisioned(name: str, needed: Requirements, given: Given) -> ToolkitError:
    """What is told where provisioning is another machine's work, and was not done."""
    return ToolkitError(
        f"{name}: the host lacks what this needs: {'; '.join(missing(needed))}",
        hint=f"{given.deploy(name)} -i INVENTORY provisions it through Ansible",
    )


def require_made(name: str, current: Release) -> None:
    """Take over no value that nobody has judged; where only the unit was changed, a new release mends it.

    Raises:
        ToolkitError: hands have changed the release's profile or manifest.
    """
    if content_digest(current.built_profile, current.manifest) != current.digest:
        current.require_unaltered(name)
