"""What `status` shows: the service as the host knows it, and what the server says of itself now."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from typing import Any

from toolkit.files import parse_json
from toolkit.profile.given import Given
from toolkit.release.claims import first_deploys
from toolkit.release.locate import Deployed, current_release, deployed_services, find_service
from toolkit.release.under_way import DEPLOYING
from toolkit.release.view import ServiceStatus, only_begun
from toolkit.release.view import status as host_status
from toolkit.service.secrets import stored_secrets
from toolkit.spans import in_words

_PATIENCE = 2.0


def observe(service: Deployed) -> dict[str, Any]:
    """The state of one service; takes no lock and changes nothing.

    Returns:
        The fields of `ServiceStatus`, and `now`: acceptance length, running and queued requests as the server
        tells them, None when it does not answer.
    """
    shown = host_status(service.layout, service.name)
    return shown.to_json() | {"now": _server_now(service, shown) if shown.healthy else None}


def observed(name: str | None) -> list[dict[str, Any]]:
    """The state of one service, or of all of this machine; first deploys that are just begun are among them.

    Raises:
        ConfigError: there is none of that name.
    """
    services = {service.name: service for service in deployed_services()}
    begun = {
        item: found.to_json() | {"now": None}
        for item in first_deploys()
        if item not in services and name in (None, item) and (found := only_begun(item)) is not None
    }
    if name is not None:
        return [begun[name] if name in begun else observe(find_service(name))]
    shown = begun | {item: observe(service) for item, service in services.items()}
    return [shown[item] for item in sorted(shown)]


def describe_status(item: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line that people read; what does not apply is left out."""
    now = item.get("now") or {}
    rows = [
        ("state", _state(item)),
        ("url", item["url"]),
        ("release", item["release"]),
        ("config", _config(item["config"]) if item["config"] else None),
        ("deployed with", _given(item["config"] or {})),
        ("now", _now(now)),
        ("accepted", _accepted(item["accepted"] or {})),
        ("judged again", _accepted(item.get("judged_again") or {})),
        ("experiment", _experiment(item["experiment"])),
        ("under way", _under_way(item)),
        ("last change", _last_change(item["transaction"])),
        ("lock", _lock(item["lock"])),
        *(("warning", text) for text in item["warnings"]),
        *(("log", line) for line in item["log"]),
    ]
    return [(label, text) for label, text in rows if text]


def age(since: float) -> str:
    """How long ago, in words."""
    return in_words(time.time() - since)


def _server_now(service: Deployed, shown: ServiceStatus) -> dict[str, Any] | None:
    import httpx

    from toolkit.acceptance.line import Line

    unit = current_release(service).unit
    key = stored_secrets(unit).get("api-key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with Line() as line:
            answer = line.get(f"{shown.url}/server_info", seconds=_PATIENCE, headers=headers)
        answer.raise_for_status()
        state = parse_json(answer.content)["internal_states"][0]
        return {
            "acceptance_length": state.get("avg_spec_accept_length"),
            "running": state.get("num_running_reqs"),
            "in_flight": state.get("num_in_flight_reqs"),
        }
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _state(item: dict[str, Any]) -> str:
    if item["since"] is None:
        return str(item["state"])
    when = _clock(item["since"])
    pid = f", pid {item['pid']}" if item["pid"] else ""
    restarts = f", {_counted(item['restarts'], 'restart')}" if item["restarts"] else ""
    return f"{item['state']} since {when} ({age(item['since'])}){pid}{restarts}"


def _now(now: dict[str, Any]) -> str | None:
    if not (length := now.get("acceptance_length")):
        return None
    return f"acceptance length {length:.2f}, {_counted(now['running'], 'request')} running"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _moment(stamp: Any) -> str:
    """A time of a report, which is ISO 8601 in UTC, as the other times are written."""
    return str(stamp).replace("T", " ").replace("+00:00", "Z")


def _clock(when: float) -> str:
    try:
        return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return "an unknown time"  # the file was damaged


def _config(config: dict[str, Any]) -> str:
    tree = config.get("speculative") or {}
    keys = ("algorithm", "budget", "topk_cap", "expansion", "block_size")
    values = " ".join(f"{key}={tree[key]}" for key in keys if tree.get(key) is not None)
    swapped = f"; swapped: {', '.join(config['swapped'])}" if config.get("swapped") else ""
    return f"{config.get('model')} on {config.get('engine')}: {values}{swapped}"


def _given(config: dict[str, Any]) -> str:
    """Options that its deploy laid on the profile; they matter to the next one."""
    given = Given.from_json(config.get("given"))
    words = [given.profile] if given.profile else []
    return shlex.join(words + given.options)


def _accepted(accepted: dict[str, Any]) -> str | None:
    if not accepted:
        return None
    lengths = accepted.get("acceptance_length") or {}
    on_trial = " by correctness alone (an experiment)" if accepted.get("mode") == "experiment" else ""
    parts = [f"{accepted.get('verdict')}{on_trial}", _moment(accepted.get("started"))]
    parts += [
        f"acceptance length {lengths[name]['value']:.2f} ({name})"
        for name in ("tree", "chain")
        if lengths.get(name)
    ]
    if (speed := accepted.get("tokens_per_second")) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    if unjudged := accepted.get("not_judged"):
        parts.append(f"not judged: {', '.join(unjudged)}")
    if failed := accepted.get("not_counted"):
        parts.append(f"failed, but not counted in an experiment: {'; '.join(failed)}")
    return ", ".join(parts)


def _experiment(experiment: dict[str, Any] | None) -> str | None:
    if experiment is None:
        return None
    left = in_words(experiment["remaining"])
    return f"by {experiment['who']}, returns to {experiment['base']} in {left}"


def _under_way(item: dict[str, Any]) -> str | None:
    """The change that runs: whose, since when, at which step, and for how long it is at it."""
    transaction, lock = item["transaction"], item["lock"]
    if transaction is not None and transaction["state"] == "running":
        kind = "first deploy" if transaction["first"] else transaction["kind"]
        words = f"{kind} by {transaction['who']}"
        if transaction["began"] is None:
            return f"{words}, just begun"
        words += f" since {_clock(transaction['began'])} ({age(transaction['began'])})"
        if transaction["step_began"] is not None:
            words += f", for {age(transaction['step_began'])} at step {transaction['step']}"
            words += f" ({transaction['doing']})"
        return words
    if item["state"] == DEPLOYING and lock is None:
        return "first deploy, just begun"
    if item["state"] == DEPLOYING and lock is not None:
        words = f"first deploy by {lock['who']} since {_clock(lock['since'])} ({age(lock['since'])})"
        return f"{words}, being prepared (host and build): nothing is started yet"
    return None


def _last_change(transaction: dict[str, Any] | None) -> str | None:
    if transaction is None or transaction["state"] == "running" or transaction["outcome"] == "committed":
        return None
    if transaction["state"] == "ended":
        return f"{transaction['kind']} {transaction['outcome'].replace('_', ' ')}: {transaction['message']}"
    where = f" at step {transaction['step']}" if transaction["step"] else ""
    words = f"{transaction['kind']} by {transaction['who']} was interrupted{where}"
    return f"{words}; the next command that changes the service finishes or reverses it first"


def _lock(lock: dict[str, Any] | None) -> str | None:
    if lock is None:
        return None
    stale = " (its holder is gone)" if lock["stale"] else ""
    return f"{lock['who']} for {age(lock['since'])}: {lock['command']}{stale}"
