"""Changed keys that the server does not depend on: put on record with the release, without a restart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.deploy.swapped import NOTHING_SWAPPED, Swapped
from toolkit.errors import ToolkitError
from toolkit.profile.changes import Change
from toolkit.profile.given import Given
from toolkit.release import history
from toolkit.release.ending import end_record
from toolkit.release.host import ServiceHost
from toolkit.release.lock import whoami
from toolkit.release.request import Outcome, Request
from toolkit.release.store import Release


@dataclass(frozen=True, slots=True)
class Recorded:
    """A profile that is put on record with a release, which serves it as it is.

    Attributes:
        release: the release.
        profile: resolved profile as a JSON object.
        swapped: keys whose values came from a swap since the last deploy, and what that gave them.
        sources: the files that it was read from; none where it was read from no file.
        given: what the deploy was asked for; None leaves that of before.
    """

    release: Release
    profile: Mapping[str, Any]
    swapped: Swapped = NOTHING_SWAPPED
    sources: Mapping[str, bytes] = field(default_factory=dict)
    given: Given | None = None


def require_recordable(host: ServiceHost, releases: Sequence[Release]) -> None:
    """Look at releases and history before anything is written there.

    Raises:
        ToolkitError: a release is damaged or was changed by hand, or something cannot be written.
    """
    for release in releases:
        release.require_unaltered(host.name)
        release.require_recordable()
    history.require_writable(host.paths)


def record(host: ServiceHost, command: str, wanted: Sequence[Recorded], changes: Sequence[Change]) -> Outcome:
    """Let the profiles of releases be these; the caller holds the lock.

    Args:
        host: the service.
        command: the command given, for the history.
        wanted: the current release first; with it what it returns to, where it is an experiment.
        changes: what differs.

    Raises:
        ToolkitError: a release is damaged, or it cannot be written; the releases' profiles are as before.
    """
    release = wanted[0].release
    require_recordable(host, [item.release for item in wanted])
    begin = time.monotonic()
    request = Request("record", whoami(), command, release.id, release.id, tuple(changes))
    done: list[tuple[Release, bytes | None, Mapping[str, bytes]]] = []
    try:
        for item in wanted:
            done.append((item.release, item.release.recorded, item.release.sources()))
            item.release.record(
                item.profile,
                swapped=item.swapped.keys,
                deployed=item.swapped.deployed,
                sources=item.sources,
                given=item.given,
            )
    except ToolkitError:
        for changed, before, sources in done:
            changed.restore_record(before, sources)
        raise
    keys = ", ".join(change.key for change in changes)
    message = "what the deploy was given is on record; nothing was restarted"
    if keys:
        message = f"{keys}: on record; the server does not depend on it, and nothing was restarted"
    return end_record(host, request, message, begin)
