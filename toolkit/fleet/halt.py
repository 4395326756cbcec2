"""A deploy stops on all hosts where one of them fails before the first restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.errors import UnreachableError
from toolkit.fleet.results import HostResult


def halted(plans: Sequence[HostResult], why: str) -> list[HostResult]:
    """The plans after a stage; where it failed on a host, all that were to be changed are skipped.

    Args:
        plans: what the stage gave. Hosts with nothing to do stay as they are.
        why: the reason that the others are told, with `{}` for the host that failed first.
    """
    bad = next((item.host for item in plans if item.error is not None), None)
    if bad is None:
        return list(plans)
    return [
        HostResult(item.host, skipped=why.format(bad))
        if item.value is not None and not item.value["plan"]["empty"]
        else item
        for item in plans
    ]


def others_not_begun(
    plans: Sequence[HostResult], done: Mapping[str, HostResult], why: str
) -> list[HostResult]:
    """The plans, but where something brought to a host failed: its error, and no other host is begun.

    Args:
        plans: of all hosts.
        done: how it went, by host.
        why: what the others are told, with {} for the name of the host.
    """
    bad = next((name for name, item in done.items() if item.error is not None), None)
    if bad is None:
        return list(plans)
    return [
        done[item.host]
        if item.host in done and not done[item.host].ok
        else HostResult(item.host, skipped=why.format(bad))
        if item.ok
        else item
        for item in plans
    ]


def leaving_out(plans: Sequence[HostResult], limit: str | None) -> list[HostResult]:
    """The plans, with each unreachable host's error naming how the others are deployed without it.

    Args:
        plans: the plans of all hosts.
        limit: the host pattern that chose them; None for all.
    """
    lost = [item.host for item in plans if isinstance(item.error, UnreachableError)]
    if not lost or len(lost) == len(plans):
        return list(plans)
    # Ansible splits a pattern at its colons only where it has no comma.
    between = ":" if limit is not None and ":" in limit and "," not in limit else ","
    pattern = between.join([*([] if limit is None else [limit]), *(f"!{name}" for name in lost)])
    words = f"deploy the others without it: --limit '{pattern}'"
    return [_with_hint(item, words) for item in plans]


def _with_hint(item: HostResult, words: str) -> HostResult:
    if not isinstance(item.error, UnreachableError):
        return item
    hint = f"{item.error.hint}; or {words}" if item.error.hint else words
    return HostResult(item.host, error=UnreachableError(item.error.message, hint=hint))
