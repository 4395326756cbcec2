"""What systemd says of a service, in the words of every manager."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from toolkit.service.manager import Difference, Leftover, ProcessStatus, State
from toolkit.service.processes import boot_id, read_stat, signal_name
from toolkit.service.started import Started
from toolkit.service.unit_files import digest, drop_ins, installed, path_of

PROPERTIES = (
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainStartTimestampMonotonic",
    "StateChangeTimestampMonotonic",
    "NRestarts",
    "InvocationID",
    "NeedDaemonReload",
    "DropInPaths",
)
# waitid(2), si_code of a child that ended.
_EXITED, _KILLED, _DUMPED = "1", "2", "3"
_STATES: Mapping[str, State] = {
    "active": "running",
    "reloading": "running",
    "refreshing": "running",
    "deactivating": "running",
    "activating": "starting",  # `auto-restart`, the pause before a restart, is a part of it
    "failed": "failed",
}
_TOLERANCE = 1.0  # seconds between a file's time and the start that follows it
_RESULTS = {
    "oom-kill": "the kernel killed it for want of memory",
    "timeout": "systemd killed it at a timeout",
    "resources": "systemd could not start it",
    "start-limit-hit": "it was started too often and is not started again",
    "watchdog": "its watchdog fell silent",
}


def status_of(unit: str, facts: Mapping[str, str], started: Started | None) -> ProcessStatus:
    """The state by `systemctl show` (`PROPERTIES`) and by what is on record."""
    code, number = facts["ExecMainCode"], _number(facts["ExecMainStatus"])
    left = tuple(item for item in (started.leftovers if started else ()) if still_there(item))
    state = _state(facts, started, left)
    return ProcessStatus(
        state=state,
        pid=_number(facts["MainPID"]) or None,
        since=_since(state, facts, started),
        restarts=_number(facts["NRestarts"]),
        exit_status=number if code == _EXITED else None,
        exit_signal=signal_name(number) if code in (_KILLED, _DUMPED) else None,
        release=started.release if started else None,
        asked_to_stop=started is not None and started.asked_to_stop,
        message=_message(state, facts, started),
        leftovers=left,
        differences=tuple(_differences(unit, facts, started)) if started else (),
    )


def still_there(item: Leftover) -> bool:
    """Whether this very process still runs."""
    stat = read_stat(item.pid)
    return stat is not None and stat.live and stat.start == item.start


def _state(facts: Mapping[str, str], started: Started | None, left: tuple[Leftover, ...]) -> State:
    state = _STATES.get(facts["ActiveState"], "stopped")
    if started is None or not started.asked_to_stop:
        return state
    if left:
        return "failed"
    # A server that had to be killed is `failed` to systemd; here a stop that was asked for succeeded.
    return "stopped" if state == "failed" else state


def _message(state: State, facts: Mapping[str, str], started: Started | None) -> str:
    if started is None and state == "stopped":
        return "never started"
    if started is not None and started.asked_to_stop and state in ("stopped", "failed"):
        return started.stopped
    if state == "running":
        return "running" if facts["ActiveState"] == "active" else facts["SubState"]
    ended = _end_words(facts)
    if state == "failed":
        restarts = _number(facts["NRestarts"])
        return f"{ended}; not started again after {restarts} restarts" if restarts else ended
    if state == "starting":
        return f"{ended}; starting again" if facts["SubState"].startswith("auto-restart") else "starting"
    return ended if facts["ExecMainCode"] == _EXITED else "not started since the boot"


def _end_words(facts: Mapping[str, str]) -> str:
    why = _RESULTS.get(facts["Result"])
    number = _number(facts["ExecMainStatus"])
    if facts["ExecMainCode"] == _EXITED:
        said = f"the server ended with status {number}"
    elif facts["ExecMainCode"] in (_KILLED, _DUMPED):
        said = f"the server was ended by {signal_name(number)}"
    else:
        return why or f"the server could not be started ({facts['Result']})"
    return f"{said}: {why}" if why else said


def _differences(unit: str, facts: Mapping[str, str], started: Started) -> Iterator[Difference]:
    path = path_of(unit)
    text = installed(unit)
    edited = text is not None and digest(text) != started.digest
    if text is None:
        yield Difference(f"the unit file {path} is gone", "restart")
    elif edited:
        yield Difference(f"the unit file {path} is not the one that was installed", "restart")
    read = {item for item in facts["DropInPaths"].split() if f"/{unit}.d/" in item}
    unread = set(drop_ins(unit)) - read
    for drop_in in sorted(read | unread):
        yield Difference(f"{drop_in} changes the unit", "hand")
    # By itself the property says little: 257 has it after a unit was enabled, 252 not for a new drop-in.
    if unread or (edited and facts["NeedDaemonReload"] == "yes"):
        words = "systemd has not read the unit files that are on disk (systemctl daemon-reload)"
        yield Difference(words, "restart" if edited else "hand")
    if text is not None and facts["MainPID"] != "0" and _older(facts, started, path.stat().st_mtime):
        yield Difference(f"the process is older than its unit file {path}", "restart")
    same = facts["InvocationID"] == started.invocation or facts["NRestarts"] != "0"
    if facts["MainPID"] != "0" and started.boot == boot_id() and not same and not started.asked_to_stop:
        yield Difference("it was started again by other means (systemctl?) than this tool", "note")


def _older(facts: Mapping[str, str], started: Started, mtime: float) -> bool:
    """Whether the process is older than a file that was written before the last start on record.

    By the monotonic clock alone it would seem so once the clock was set back.
    """
    began = _number(facts["ExecMainStartTimestampMonotonic"]) / 1e6
    written = mtime - time.time() + time.monotonic()
    return began < written - _TOLERANCE and started.time < mtime - _TOLERANCE


def _since(state: State, facts: Mapping[str, str], started: Started | None) -> float | None:
    # A unit that is neither active nor enabled may be forgotten by systemd, and its times with it.
    if started is not None and started.asked_to_stop and state == "stopped" and started.ended:
        return started.ended
    changed = _number(facts["StateChangeTimestampMonotonic"])
    if changed:
        return time.time() - time.monotonic() + changed / 1e6
    return started.time if started is not None else None


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
