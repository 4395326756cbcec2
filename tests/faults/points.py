"""Where a change can be struck: the moments around each of its operations, from a run that counts them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

# Faults that a matrix injects, with the words for people.
FAULTS = {
    "controller": "controller killed",
    "network": "network cut",
    "reboot": "host rebooted",
    "disk": "disk full",
}
# What takes no space: journal and record are overwritten in place, in space that they have.
_FREE = re.compile(
    r"pwrite|unlink|remove|rmdir|rmtree|truncate|ftruncate|fsync|fdatasync|chmod|fchmod|"
    r"run systemctl.* (stop|disable|reset-failed) |posix_fallocate \S*/started "
)
_HIDDEN = re.compile(r"\w+ (\S*/(?:\.[^/]+|transaction\.new|ddtoolkit-[a-z]+)/)")
_MAY_FAIL = re.compile(
    r"before ((?:open|mkdir|symlink|link|rename|replace|write|pwrite|posix_fallocate|fsync|fdatasync|"
    r"copytree|extractall) .*) #(\d+)"
)
BULK = ("rmtree", "copytree", "extractall")
ROW = 12


@dataclass(frozen=True)
class Moment:
    """One place in a change.

    Attributes:
        role: process: `control`, `bootstrap`, `ansible`, `agent`, `transaction`.
        label: operation at which it is.
        occurrence: which of the operations with this label in that process, from 1.
        side: `before`, `middle` or `after` it.
        inner: with `middle`: at which call within the operation.
        step: what the change is doing, for people.
        files: whether the operation is one on files.
        same_as: labels of operations that this one stands for as well, since nothing lies between.
        allocates: whether what comes next may take space on the disk; elsewhere a disk that fills up is the
            same as one that fills up at the next such moment.
    """

    role: str
    label: str
    occurrence: int
    side: str
    step: str
    files: bool
    inner: int = 0
    same_as: tuple[str, ...] = ()
    allocates: bool = False

    @property
    def key(self) -> str:
        """What tells it from the other moments of the same change."""
        return f"{self.role}: {self.side} {self.label} #{self.occurrence}"

    def takes(self, fault: str) -> bool:
        """Whether the fault at this moment is another than at the next one."""
        if fault == "enospc":
            return self._operation() is not None
        if fault == "process":
            return self.role != "control"
        return fault != "disk" or self.allocates

    def plan(self, act: str) -> dict[str, Any]:
        """The plan for the hook."""
        plan = {**asdict(self), "act": act}
        if act == "enospc":
            found = self._operation()
            assert found is not None
            plan |= {"label": found[1], "occurrence": int(found[2]), "side": "before"}
        return plan

    def _operation(self) -> re.Match[str] | None:
        """The operation that comes next and may find the disk full."""
        names = (f"{self.side} {self.label} #{self.occurrence}", *self.same_as)
        return next((found for name in names if (found := _MAY_FAIL.fullmatch(name))), None)


def moments(trace: Iterable[str]) -> list[Moment]:
    """Every moment of a counted change, in order; those with nothing between them are one.

    Args:
        trace: the lines that the hook wrote, of control machine and host together.

    Returns:
        One moment for what is `after` an operation and `before` the next one of the same process. An
        operation that changes nothing (fsync, `systemctl show`) has the same state before and after. Of many
        like operations in a row (a chmod for each file) the first, the middle and the last count.
    """
    lines = sorted((json.loads(line) for line in trace), key=lambda line: line["time"])
    found: list[Moment] = []
    last: dict[str, dict[str, Any]] = {}
    step = Stepper()
    for line in _without_rows(lines):
        role = line["role"]
        step.see(line)
        name = f"{line['side']} {line['label']} #{line['occurrence']}"
        if line["side"] == "after" and line["inner"] > 1 and _verb(line) in BULK:
            found.append(_moment(line, step.of(line), "middle", line["inner"] // 2))
        if role in last and _same_state(last[role], line):
            _join(found, role, name, allocates=_allocates(line))
        else:
            found.append(_moment(line, step.of(line), line["side"], 0))
        last[role] = line
    return found


def _same_state(before: dict[str, Any], now: dict[str, Any]) -> bool:
    if now["side"] == "after":
        return not now["changes"]
    if now.get("apart"):
        return False
    # A file's content is written between two counted operations: what follows an `open` is another moment.
    # Between two tasks of Ansible, each a process, nothing happens on the host either.
    joined = before["pid"] == now["pid"] or now["role"] == "ansible"
    return joined and before["side"] == "after" and _verb(before) != "open"


def _without_rows(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for kind, group in groupby(lines, key=_row):
        row = list(group)
        if kind[-1] and len(row) > ROW:
            half = len(row) // 4 * 2
            apart = [row[half] | {"apart": True}, row[half + 1], row[-2] | {"apart": True}, row[-1]]
            row = [*row[:2], *apart]
        yield from row


def _row(line: dict[str, Any]) -> tuple[Any, ...]:
    """What like operations in a row have in common; the last: whether they are such."""
    label = line["label"].partition(" @ ")[0]
    hidden = _HIDDEN.match(label)
    if (
        hidden is not None and _verb(line) not in BULK
    ):  # files of a folder that nobody reads before it is renamed
        return (line["role"], line["pid"], hidden[1], True)
    return (line["role"], line["pid"], _verb(line), *line["where"][:1], line["files"])


def _verb(line: dict[str, Any]) -> str:
    verb: str = line["label"].split(" ", 1)[0]
    return verb


def _moment(line: dict[str, Any], step: str, side: str, inner: int) -> Moment:
    more = {"inner": inner, "allocates": _allocates(line) or side == "middle"}
    return Moment(line["role"], line["label"], line["occurrence"], side, step, line["files"], **more)


def _allocates(line: dict[str, Any]) -> bool:
    if line["side"] != "before" or _FREE.match(line["label"]):
        return False
    return line["role"] != "control" and (line["files"] or bool(line["changes"]))


def _join(found: list[Moment], role: str, name: str, *, allocates: bool) -> None:
    for index in range(len(found) - 1, -1, -1):
        if found[index].role == role:
            joined = {"same_as": (*found[index].same_as, name)}
            joined["allocates"] = found[index].allocates or allocates
            found[index] = replace(found[index], **joined)
            return


# What the functions of the toolkit do, outermost name first that matches.
_WORK = (
    ("bootstrap.", "tool"),
    ("lock.", "lock"),
    ("locate.remember", "record"),
    ("operations._remember_interpreter", "record"),
    ("builder.", "build"),
    ("store.Store.stage", "stage"),
    ("secrets.store_secrets", "secrets"),
    ("controller._write_transaction", "prepare"),
    ("recovery_unit.", "spawn"),
    ("controller._spawn", "spawn"),
    ("controller.begin", "prepare"),
    ("reserve.", "lock"),
    ("lock.Lock.hold_transaction", "spawn"),
    ("ending.prune", "prune"),
    ("history.", "history"),
    ("store.Store.forget_switches", "history"),
    ("ending.end", "history"),
)


class Stepper:
    """Names the step of each operation: of a transaction by its journal, of all else by who works."""

    def __init__(self) -> None:
        self._step = "spawn"

    def see(self, line: dict[str, Any]) -> None:
        """Take note of a journal write."""
        for place in line["where"]:
            if place.startswith("step:"):
                self._step = place.removeprefix("step:")

    def of(self, line: dict[str, Any]) -> str:
        """The step of an operation."""
        if line["role"] in ("control", "bootstrap", "ansible"):
            return {"control": "connection", "bootstrap": "tool", "ansible": "provision"}[line["role"]]
        for place in line["where"]:
            for start, name in _WORK:
                if place.startswith(start):
                    return name
        return self._step if line["role"] == "transaction" else "lock"
