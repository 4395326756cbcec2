"""Carrying out a planned deploy, by one transaction."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.deploy.judging import Judging
from toolkit.deploy.prepare import Prepared
from toolkit.deploy.record import Recorded, record, require_recordable
from toolkit.deploy.releasing import NewRelease, build_here, provision, release, unprovisioned
from toolkit.deploy.swapped import NOTHING_SWAPPED
from toolkit.deploy.watcher import Watcher
from toolkit.errors import ToolkitError
from toolkit.profile.secrets import require_secrets
from toolkit.release.control import run_request
from toolkit.release.host import ServiceHost
from toolkit.release.locate import remember
from toolkit.release.lock import whoami
from toolkit.release.request import Kind, Outcome, Request
from toolkit.release.store import Release


def deploy(
    prepared: Prepared,
    watcher: Watcher,
    *,
    lock_wait: float,
    judging: Judging,
    given: Mapping[str, str] | None = None,
    built: dict[str, Any] | None = None,
    ignored: Sequence[str] = (),
) -> Outcome | None:
    """Carry out a planned deploy.

    Args:
        prepared: what is to be done.
        watcher: told of every step.
        lock_wait: seconds to wait for the lock.
        judging: how the release is judged.
        given: values of the secrets, where these and provisioning are another machine's work; else None.
        built: what `build_ahead` gave; None builds here.
        ignored: checks of the doctor that were told not to count; the history has them.

    Returns:
        The transaction's outcome; None when provisioning and repairs were all there was to do.

    Raises:
        ConfigError: a secret cannot be read.
        LockedError: another change is under way.
        ToolkitError: provisioning or the build failed; nothing that serves was touched.
    """
    plan = prepared.plan
    if plan.has("provision") and given is not None:
        raise unprovisioned(prepared.host.name, prepared.needed, prepared.resolved.given)
    if plan.has("release") and given is None:
        require_secrets(prepared.profile)
    if prepared.current is not None and plan.has("record") and not plan.has("release"):
        require_recordable(prepared.host, [prepared.current])
    remember(prepared.service)
    if plan.has("provision"):
        provision(prepared.profile, prepared.service, watcher)
    if not any(plan.has(action) for action in ("repair", "release", "record", "restart", "start")):
        return None
    asked = prepared.resolved.given
    words = [word for name in ignored for word in ("--ignore-check", name)]
    command = shlex.join([*asked.words(prepared.profile.name), *words])
    with watcher.hold(prepared.service, command, wait=lock_wait) as session:
        _refuse_if_moved(session.host, prepared.current)
        _repair(prepared, watcher)
        if not plan.has("release"):
            recorded = None
            if prepared.current is not None and plan.has("record"):
                wanted = Recorded(
                    prepared.current, prepared.resolved.data, sources=prepared.sources, given=asked
                )
                recorded = record(session.host, command, [wanted], plan.changes)
            if not (plan.has("restart") or plan.has("start")):
                return recorded
            kind: Kind = "restart" if plan.has("restart") else "start"
            request = Request(kind=kind, who=whoami(), command=command, release=prepared.current_id)
            return run_request(session, request, watcher.event)
        change = NewRelease(
            "deploy",
            command,
            prepared.profile,
            prepared.resolved.data,
            plan.changes,
            NOTHING_SWAPPED,
            prepared.sources,
            asked,
            built,
        )
        return release(session, change, prepared.current, watcher, judging, given)


def build_ahead(prepared: Prepared, watcher: Watcher) -> dict[str, Any] | None:
    """Build what a planned deploy will serve, before anything is touched.

    Returns:
        The manifest, for `deploy`; None where the plan has no new release.

    Raises:
        ToolkitError: the build failed.
    """
    if not prepared.plan.has("release"):
        return None
    layout = prepared.service.layout
    return build_here(prepared.profile, prepared.environment, prepared.current, layout, watcher)


def _repair(prepared: Prepared, watcher: Watcher) -> None:
    """Set right what can be set right while the server runs.

    Raises:
        ToolkitError: something cannot be; names it.
    """
    for drift in prepared.drifts:
        if drift.repair is None:
            continue
        watcher.step("repair", str(drift))
        try:
            drift.repair()
        except (OSError, KeyError) as error:
            raise ToolkitError(f"{drift.subject}: cannot be set right: {error}", hint=drift.fix) from error


def _refuse_if_moved(host: ServiceHost, planned: Release | None) -> None:
    now = host.store.current()
    if (now.id if now else None) != (planned.id if planned else None):
        current = now.id if now else "no release"
        raise ToolkitError(
            f"{host.name} was changed while this deploy was planned: {current} is current",
            hint="run the same command again to see the new plan",
        )
