"""The server as it describes itself: what it decodes with, against the profile of its release."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from toolkit.files import parse_json
from toolkit.plan.finding import Drift, Mend
from toolkit.profile.schema import Profile
from toolkit.service.secrets import stored_secrets
from toolkit.service.unit import Unit

_PATIENCE = 3.0
_KEYS = {
    "speculative_algorithm": "algorithm",
    "speculative_ddtree_budget": "budget",
    "speculative_ddtree_topk_cap": "topk_cap",
    "speculative_ddtree_expansion": "expansion",
}


def drifts(unit: Unit, profile: Profile, since: float | None) -> Iterator[Drift]:
    """Values that the server runs with and the profile does not have.

    Args:
        unit: the unit of the current release.
        profile: its profile.
        since: when it was started, seconds since the epoch; a server that loads cannot answer yet.
    """
    import httpx

    from toolkit.acceptance.line import Line

    restart = f"ddtoolkit restart {unit.name}"
    key = stored_secrets(unit).get("api-key")
    if key is None and "api-key" in unit.secrets:
        return  # that the secrets are gone is a drift of its own
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with Line() as line:
            answer = line.get(f"{unit.url}/server_info", seconds=_PATIENCE, headers=headers)
        answer.raise_for_status()
        info = parse_json(answer.content)
        if not isinstance(info, dict):
            raise ValueError("the answer is no JSON object")  # noqa: TRY004
    except (httpx.HTTPError, ValueError) as error:
        why = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            why = f"it answers with status {error.response.status_code}"
        loads = since is None or time.time() - since < unit.load_timeout
        said, seen = f"does not tell its configuration: {why}", why
        mend: Mend = "hand" if loads else "restart"
        yield Drift("server", unit.url, said, restart, "an answer to GET /server_info", seen, mend)
        return
    for name, own in _KEYS.items():
        running, wanted = info.get(name), _wanted(profile, own)
        if running is not None and wanted is not None and running != wanted:
            said = f"{running} runs, {wanted} is deployed"
            expected, seen = str(wanted), str(running)
            yield Drift("server", f"speculative.{own}", said, restart, expected, seen, "restart")


def _wanted(profile: Profile, key: str) -> Any:
    if key != "algorithm" and profile.speculative.algorithm != "DDTREE":
        return None
    value = getattr(profile.speculative, key)
    return None if value == "NONE" else value
