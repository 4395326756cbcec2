"""What must hold after a fault, and what must hold once the next command has been given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.faults.bench import KEY, Result
from tests.faults.scenarios import Scenario

if TYPE_CHECKING:
    from tests.faults.strike import Run

# 0 done, 1 failed, 4 unreachable, 5 rolled back; 6 would be: nothing serves.
ALLOWED = (0, 1, 4, 5)
SERVES = {"committed": "new", "rolled_back": "old", "not_started": "old", "first_failed": "none"}

Look = dict[str, Any]


def judge_settled(run: Run, before: Look, found: Look, result: Result | None, bound: float) -> None:
    """Check the state that the fault led to, before anyone helps."""
    old, change = before["current"], begun(before, found)
    run.outcome = change["outcome"] if change else None
    run.serving = _which(found["running"], old)
    wrong = run.problems.append
    if run.tokens_after is not None and run.tokens_after > bound:
        wrong(f"tokens came only after {run.tokens_after} s")
    if old is None and run.serving == "none":
        _judge_stopped(run, found)
    else:
        _judge_serving(run, found)
    if change:
        _judge_record(run, found, change, first=old is None)
    if found["damaged"]:
        wrong(f"damaged: {found['damaged']}")
    if found["crash"]:
        wrong("the transaction's process crashed")
    if found["leaks"]:
        wrong(f"the key is in {found['leaks']}")
    if result is not None:
        _judge_command(run, result)


def _judge_record(run: Run, found: Look, change: Look, *, first: bool) -> None:
    """The outcome must be what is, and be in the history, once."""
    wrong, outcome = run.problems.append, change["outcome"]
    if outcome is None:
        if change["steps"]:
            wrong(f"the transaction is left at step {change['steps'][-1]}")
        return
    serves = SERVES.get(outcome)
    if ("none" if serves == "old" and first else serves) != run.serving:
        wrong(f"its outcome is {outcome}, but {run.serving} serves: {change['message']}")
    if [entry["outcome"] for entry in entries(found, change)] != [outcome]:
        wrong(f"its entries in the history are {entries(found, change)}")


def _judge_stopped(run: Run, found: Look) -> None:
    """A failed first deploy."""
    if found["unit"]["ActiveState"] not in ("inactive", "failed") or found["current"] is not None:
        run.problems.append(f"half deployed: {found['unit']}, current {found['current']}")
    if found["unit"]["enabled"] == "enabled":
        run.problems.append("what failed would be started at the next boot")
    if found["unit_release"] is not None:
        run.problems.append(f"the unit file of {found['unit_release']} is left")


def _judge_serving(run: Run, found: Look) -> None:
    wrong = run.problems.append
    unit = found["unit"]
    if run.tokens_after is None or unit["ActiveState"] != "active":
        wrong(f"no tokens: {unit}, current {found['current']}")
    if not found["current"] == found["running"] == found["unit_release"]:
        named = found["current"], found["running"], found["unit_release"]
        wrong("current is {}, {} runs, the unit file has {}".format(*named))
    if unit["enabled"] != "enabled":
        wrong(f"not started at boot: {unit['enabled']}")
    if unit["NRestarts"] != "0":
        wrong(f"systemd restarted it {unit['NRestarts']} times")


def _judge_command(run: Run, result: Result) -> None:
    run.exit_code = result.code
    wrong = run.problems.append
    said = result.out + result.err
    tail = result.err[-600:]
    if result.code not in ALLOWED:
        wrong(f"exit status {result.code}: {tail}")
    if "Traceback" in said:
        wrong(f"a traceback: {tail}")
    if KEY in said:
        wrong("the key is in what the command said")
    if result.code == 0 and run.serving != "new":
        wrong(f"exit status 0, but {run.serving} serves")
    if result.code == 5 and run.serving == "new":
        wrong("exit status 5, but new serves")
    if result.code not in (0,) and not result.err.strip():
        wrong("it failed without a word")


def judge_end(run: Run, before: Look, settled: Look, found: Look, scenario: Scenario) -> None:
    """Check the state once the next command has been given."""
    wrong = run.problems.append
    if found["current"] is None:
        wrong("after the next command nothing is deployed")
    else:
        after = Checked()
        _judge_serving(after, found)  # type: ignore[arg-type]
        run.problems += [f"after the next command: {text}" for text in after.problems]
    for what in ("damaged", "stray", "leaks"):
        if found[what]:
            wrong(f"after the next command {what}: {found[what]}")
    if found["lock"]:
        wrong("after the next command it is still locked")
    ids = [entry["id"] for entry in found["history"]]
    if len(set(ids)) != len(ids):
        wrong("a change has two entries in the history")
    change = begun(before, settled)
    if change and len(entries(found, change)) != 1:
        wrong(f"the struck change has {len(entries(found, change))} entries in the history")
    if change and change["outcome"] is None:
        made = entries(found, change)
        if made and made[0]["outcome"] not in ("not_started",):
            wrong(f"the change that had not begun was recorded as {made[0]}")


class Checked:
    """Problems of a state in which tokens came."""

    tokens_after = 0.0

    def __init__(self) -> None:
        self.problems: list[str] = []


def begun(before: Look, found: Look) -> Look | None:
    """The struck transaction, where one was prepared."""
    change: Look | None = found["transaction"]
    known = before["transaction"]
    return None if change is None or (known and known["id"] == change["id"]) else change


def entries(found: Look, change: Look) -> list[Look]:
    """Its entries in the history."""
    return [entry for entry in found["history"] if entry["id"] == change["id"]]


def _which(running: str | None, old: str | None) -> str:
    if running is None:
        return "none"
    return "old" if running == old else "new"
