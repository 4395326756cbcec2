"""history."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolkit.cli import fleet
from toolkit.cli.options import Inventories, Json, Limit, ServiceName
from toolkit.cli.output import answer, emit, say

_REASON = 250  # characters of a reason in the table


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("history")(history)


def history(
    name: ServiceName = None,
    count: Annotated[int, typer.Option("-n", "--lines", min=1, help="Newest entries to show.")] = 20,
    entry: Annotated[
        str | None,
        typer.Option("--entry", metavar="ID", help="Show all of one change, by its release or its own id."),
    ] = None,
    inventory: Inventories = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Who changed what, when, and how it ended and why; the newest last."""
    where = fleet.where(inventory, limit)
    asked = {"count": count, "entry": entry}
    show = show_entries if entry else show_table
    if where is not None:
        fleet.show_each(name, "history", asked, where, show, as_json=as_json)
        return
    from toolkit.hostside.operations import past

    found = past({"service": name, **asked})
    if as_json:
        emit(found["entries"])
    else:
        show(found)


def show_table(found: dict[str, Any]) -> None:
    """One line a change, with who made it, what it changed, and, where it did not succeed, why."""
    entries, current = found["entries"], found["current"]
    newest = [entry for entry in entries if current and entry["release"] == current][-1:]
    if found["earlier"]:
        say(f"{found['earlier']} earlier entries: -n {found['earlier'] + len(entries)} shows them")
    cut = None
    for entry in entries:
        gone = entry["release"] is not None and entry["release"] not in found["kept"]
        mark = " (current)" if entry in newest else " (removed)" if gone else ""
        when = entry["when"][:16].replace("T", " ")  # to the minute, which leaves room for whole ids
        outcome = entry["outcome"].replace("_", " ")
        answer(f"{when}Z  {entry['release'] or '-':<25}  {entry['kind']:<10}  {outcome}{mark}")
        itself = entry["kind"] == "return"
        answer(f"    by {'itself, at the end of an experiment of ' if itself else ''}{entry['who']}")
        for line in _changes(entry):
            answer(f"    {line}")
        if failed := entry.get("uncounted"):
            answer(f"    failed, but not counted in an experiment: {'; '.join(failed)}")
        if entry["kind"] == "record" and not entry["changes"]:
            answer(f"    {entry['message']}")
        reason = _reason(entry)
        if len(reason) > _REASON:
            reason, cut = f"{reason[: _REASON - 1]}…", entry
        if reason:
            answer(f"    why: {reason}")
    if cut is not None:
        say(f"a reason was cut: --entry {cut['release'] or cut['id']} shows it whole")


def show_entries(found: dict[str, Any]) -> None:
    """All that the history has of each change."""
    for entry in found["entries"]:
        when = entry["when"][:19].replace("T", " ")
        answer(f"{when}Z  {entry['kind']}: {entry['outcome'].replace('_', ' ')}")
        seconds = ", ".join(f"{step} {value:.1f}" for step, value in entry["seconds"].items())
        rows = [
            ("release", entry["release"]),
            ("before", entry["base"]),
            ("by", entry["who"]),
            ("command", entry["command"]),
            *(("change", line) for line in _changes(entry)),
            ("why", _reason(entry)),
            *(("failed", f"{text} (not counted in an experiment)") for text in entry.get("uncounted", ())),
            ("ended", entry["message"]),
            ("seconds", seconds),
            ("id", entry["id"]),
        ]
        for label, text in rows:
            if text:
                answer(f"    {label:<9}{text}")


def _reason(entry: dict[str, Any]) -> str:
    """Why it did not succeed; older entries have it in the message alone."""
    return str(entry.get("reason") or ("" if entry["outcome"] == "committed" else entry["message"]))


def _changes(entry: dict[str, Any]) -> list[str]:
    from toolkit.plan.steps import describe
    from toolkit.profile.changes import Change

    return describe([Change(**change) for change in entry["changes"]])
