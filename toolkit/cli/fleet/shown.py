"""What is said of hosts: plans, diffs, errors and how a change ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.fleet.where import Manner
from toolkit.cli.output import emit, say
from toolkit.cli.plans import show_plan
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult

# Changes that are none where nothing differs, and what is told then.
ONLY_WITH_CHANGES = {
    "swap": "every key has that value already",
    "upgrade": "it runs on this version and its libraries",
}


def show_plans(plans: Sequence[HostResult], tell: Callable[[str], None]) -> None:
    """The plan of each host."""
    for item in plans:
        if item.value is not None:
            show_plan(item.value["plan"], item.host, tell)


def show_changes(operation: str, service: str, previews: Sequence[HostResult]) -> None:
    """The diff, once for all hosts that have the same."""
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for item in previews:
        if item.value is not None:
            felt = item.value.get("restarts", True)
            groups.setdefault((tuple(item.value["changes"]), felt), []).append(item.host)
    for (changes, felt), hosts in groups.items():
        if not changes and operation in ONLY_WITH_CHANGES:
            say(f"{', '.join(hosts)}: nothing to do, {ONLY_WITH_CHANGES[operation]}")
            continue
        say(
            f"{operation} of {service} on {', '.join(hosts)}, {'one restart each' if felt else 'no restart'}:"
        )
        for line in changes:
            say(f"  {line}")
    for item in previews:
        for line in (item.value or {}).get("notices", ()):
            say(f"  {item.host}: note: {line}")
        if item.value is not None and not item.value["changes"] and "hint" in item.value:
            say(f"  {item.host}: {item.value['hint']}")


def tell_waiting(host: str, message: dict[str, Any]) -> None:
    """Say who is waited for; no board is up yet."""
    if "step" in message:
        say(f"{host}: {message['step'][1]}")


def show_errors(results: Sequence[HostResult]) -> None:
    """Say what went wrong, host by host."""
    for item in results:
        if item.error is not None:
            show_error(item.host, item.error)


def show_error(host: str, error: ToolkitError) -> None:
    """Say what went wrong on a host, and the next step."""
    for line in error.message.splitlines():
        say(f"error: {line if host in line else f'{host}: {line}'}")
    if error.hint:
        say(f"  next: {error.hint}")


def finish(results: Sequence[HostResult], manner: Manner) -> None:
    """Say how it ended on each host, and exit with the worst of it."""
    from toolkit.fleet.results import to_json

    if manner.as_json:
        emit(to_json(results))
    for item in results:
        if item.skipped:
            say(f"{item.host}: {item.skipped}")
        elif item.error is not None:
            show_error(item.host, item.error)
        elif item.value and item.value.get("outcome"):
            _outcome(item.host, item.value)
    exit_with_worst(results)


def _outcome(host: str, value: dict[str, Any]) -> None:
    from toolkit.cli.progress import downtime_words

    outcome = value["outcome"]
    for line in outcome["log"]:
        say(f"  {host} | {line}")
    tail = downtime_words(outcome)
    say(f"{host}: {outcome['kind']}: {outcome['status'].replace('_', ' ')}: {outcome['message']}{tail}")
    lengths = (value.get("report") or {}).get("acceptance_length") or {}
    if outcome["serving"] and (tree := lengths.get("tree")):
        say(
            f"  acceptance length {tree['value']:.2f}; {value['url']} on the host, release {value['release']}"
        )
    if outcome["hint"]:
        say(f"  next: {outcome['hint']}")


def exit_with_worst(results: Sequence[HostResult]) -> None:
    """Exit with the worst of their exit statuses; return where all is well.

    Raises:
        typer.Exit: it is not.
    """
    from toolkit.fleet.results import worst

    if code := worst(results):
        raise typer.Exit(code)
