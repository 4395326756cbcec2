"""Changed keys that the server does not depend on: put on record with the release, without a restart."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.profile.changes import Change
from toolkit.release import history
from toolkit.release.host import ServiceHost
from toolkit.release.lock import whoami
from toolkit.release.request import Outcome, Request
from toolkit.release.store import Release


def record(
    host: ServiceHost,
    release: Release,
    command: str,
    *,
    profile: Mapping[str, Any],
    changes: Sequence[Change],
    swapped: Collection[str],
    sources: Mapping[str, bytes],
) -> Outcome:
    """Let the release's profile be this one; the caller holds the lock.

    Args:
        host: the service.
        release: the current release.
        command: the command given, for the history.
        profile: resolved profile as a JSON object, which would be served as the release is.
        changes: what differs.
        swapped: keys whose values came from a swap since the last deploy.
        sources: the files that it was read from; none where it was read from no file.

    Raises:
        ToolkitError: it cannot be written; the release's profile is as before.
    """
    begin = time.monotonic()
    request = Request("record", whoami(), command, release.id, release.id, tuple(changes))
    release.record(profile, swapped=swapped, sources=sources)
    keys = ", ".join(change.key for change in changes)
    outcome = Outcome(
        "committed",
        f"{keys}: on record; the server does not depend on it, and nothing was restarted",
        request.kind,
        release=release.id,
        base=release.id,
        serving=release.id if host.process_status().active else None,
        seconds={"total": round(time.monotonic() - begin, 3)},
        transaction=request.id,
    )
    try:
        history.append(host.paths, history.entry_of(request, outcome))
    except ToolkitError as error:
        raise ToolkitError(f"{outcome.message}, but {error.message}", hint=error.hint) from error
    return outcome
