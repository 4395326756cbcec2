"""The tables of docs/faults.md, made of the matrix's result."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.points import FAULTS, Moment

BEGIN, END = "<!-- made by scripts/fault_matrix.py -->\n", "<!-- end -->\n"
WATCHERS = ("controller", "network")
TITLES = {
    "provision": "First deploy: reaching the host and provisioning it",
    "deploy": "First deploy: build and transaction",
    "swap": "Swap",
    "rollback": "Rollback",
    "refused": "A swap that acceptance refuses: the way back",
}
ON_DISK = {
    "connection": "nothing of the change",
    "tool": "the toolkit's code, under a name of its own until it is whole",
    "provision": "the system user and folders, as far as Ansible came",
    "lock": "the lock, with its holder",
    "record": "where the service lies, and the interpreter for later commands",
    "build": "the environment, under a hidden name until it is whole",
    "secrets": "the release's secrets, under a hidden name until they are whole",
    "stage": "the release, under a hidden name until it is whole",
    "prepare": "request and empty journal in `transaction.new`, then renamed to `transaction`",
    "spawn": "the transaction, with nothing in its journal; its unit is being started",
    "preflight": "links to both releases, to switch by",
    "stop_old": "the unit is not enabled any more: a reboot starts nothing that was not accepted",
    "switch": "`current` names the old or the new release",
    "start_new": "the new release's unit file, and the record of its start",
    "ready": "the new release is started, not enabled",
    "acceptance": "the report, under a hidden name until it is whole",
    "commit": "the report is the release's; its unit is enabled",
    "prune": "the oldest release, under a hidden name while it is removed",
    "history": "the entry in the history, then the outcome in the journal",
    "stop_new": "the journal says why it goes back",
    "switch_back": "`current` names the new or the old release",
    "start_old": "the old release's unit file, and the record of its start",
    "ready_old": "the old release is started and enabled",
}
# Who serves and the outcome, in words.
WORDS = {
    ("new", "committed"): "goes on by itself, the new release serves",
    ("old", None): "the old release serves on; the next command begins anew",
    ("old", "not_started"): "the old release serves on; recorded as not started",
    ("old", "rolled_back"): "undone, the old release serves",
    ("none", None): "nothing is deployed; the next command begins anew",
    ("none", "not_started"): "nothing is deployed; recorded as not started",
    ("none", "first_failed"): "stopped, and says so",
}


def tables(data: dict[str, Any]) -> str:
    """Markdown: what the runs came to, a table a change and a row a step."""
    runs, points = data["runs"], data["points"]
    out = [summary(data), ""]
    for name, moments in points.items():
        out += [f"### {TITLES[name]}", "", f"| step | on disk | {' | '.join(FAULTS.values())} |"]
        out.append("| --- " * (len(FAULTS) + 2) + "|")
        for step in dict.fromkeys(moment["step"] for moment in moments):
            mine = [run for run in runs if (run["scenario"], run["step"]) == (name, step)]
            cells = [cell([run for run in mine if run["fault"] == fault]) for fault in FAULTS]
            out.append(f"| `{step}` | {ON_DISK[step]} | {' | '.join(cells)} |")
        out.append("")
    return "\n".join(out)


def summary(data: dict[str, Any]) -> str:
    """How much there is, and whether every check held."""
    runs, missing = data["runs"], left(data)
    bad = sum(bool(run["problems"]) for run in runs)
    operations = sum(1 + len(m["same_as"]) for items in data["points"].values() for m in items)
    moments = sum(map(len, data["points"].values()))
    slowest = max((run["tokens_after"] or 0.0 for run in runs), default=0.0)
    text = (
        f"{len(runs)} runs over {moments} moments, which stand for {operations} places before and after an "
        f"operation; {bad or 'none'} of them with a check that did not hold. The longest time from a fault "
        f"until tokens came again: {slowest:.1f} s, where {data['bound_seconds']} s are allowed."
    )
    if missing:
        watched = sum(moment.role == "transaction" and fault in WATCHERS for _, moment, fault in missing)
        text += (
            f" {len(missing)} more are to be made, with which the same command goes on; in {watched} of them "
            "the controller is killed or the network cut while the transaction, which feels neither, works."
        )
    return text


def left(data: dict[str, Any]) -> list[tuple[str, Moment, str]]:
    """What has not been run yet: change, moment and fault."""
    struck = {(run["scenario"], run["moment"], run["fault"]) for run in data["runs"]}
    return [
        (name, moment, fault)
        for name, items in data["points"].items()
        for item in items
        for fault in FAULTS
        if (moment := _moment(item)).takes(fault) and (name, moment.key, fault) not in struck
    ]


def _moment(item: dict[str, Any]) -> Moment:
    return Moment(**{key: value for key, value in item.items() if key != "key"})


def cell(runs: list[dict[str, Any]]) -> str:
    """What became of the runs of one step and one fault, with the longest time until tokens came again."""
    if not runs:
        return "-"
    kinds = Counter((run["serving"], run["outcome"]) for run in runs if not run["problems"])
    parts = []
    for kind, number in kinds.most_common():
        after = [r["tokens_after"] or 0.0 for r in runs if (r["serving"], r["outcome"]) == kind]
        seconds = f", {max(after):.1f} s" if max(after) > 0 and kind[0] != "none" else ""
        parts.append(f"{WORDS.get(kind, f'{kind[0]} serves, {kind[1]}')} ({number}{seconds})")
    if bad := sum(bool(run["problems"]) for run in runs):
        parts.append(f"**{bad} with a check that did not hold**")
    return "; ".join(parts)


def update(result: Path, document: Path) -> str:
    """The document's text with the tables of the result."""
    text = document.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "\n" + tables(json.loads(result.read_bytes())) + rest[rest.index(END) :]
