"""One run: a change from a known state, struck once, and what became of it."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import hook
from tests.faults.bench import KEY, PORT, Bench, Result, Running
from tests.faults.followup import repeat_inside, repeat_outside
from tests.faults.points import Moment
from tests.faults.scenarios import Scenario, arm
from tests.faults.verdict import judge_end, judge_settled
from tests.faults.watch import Watch, busy
from tests.hosts.machines import FILLER, Host
from toolkit.errors import ToolkitError

# Seconds until a command that was not struck at its point counts as missed.
REACH_LIMIT = 60.0
# Besides the bound: the machine under test is slower than a host that does nothing else.
SLACK = 20.0
LINGER = 3.0
PAUSE = 0.03
PAGE = 4096


@dataclass
class Run:
    """What one fault at one moment came to.

    Attributes:
        scenario: name of the change.
        moment: `Moment.key`.
        step: what the change was doing.
        fault: `controller`, `network`, `reboot`, `disk`, `process` or `enospc`.
        problems: what is wrong; empty: every check held.
        serving: `old`, `new` or `none`, once everything had settled.
        outcome: of the transaction, by its journal; None where none had begun, or the next command ends it.
        exit_code: of the struck command; negative: its signal.
        settled: seconds from the fault until everything had settled.
        tokens_after: seconds from the fault until tokens came for good; 0.0: they never stopped.
        without_tokens: seconds without tokens, in all.
        again: what the next command came to.
    """

    scenario: str
    moment: str
    step: str
    fault: str
    problems: list[str] = field(default_factory=list)
    serving: str = "none"
    outcome: str | None = None
    exit_code: int | None = None
    settled: float = 0.0
    tokens_after: float | None = None
    without_tokens: float = 0.0
    again: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def strike(bench: Bench, scenario: Scenario, moment: Moment, fault: str, *, cli: bool = False) -> Run:
    """Run `scenario` from its base, inject `fault` at `moment`, and check everything afterwards.

    Args:
        bench: the prepared host.
        scenario: the change.
        moment: where it is struck.
        fault: what happens there.
        cli: give the next commands through SSH too, as a user does; else the host's agent is asked directly,
            which is quicker.
    """
    run = Run(scenario.name, moment.key, moment.step, fault)
    bench.reset(scenario.base)
    before = bench.base(scenario.base)
    act = {"process": "kill", "enospc": "enospc"}.get(fault, "hold")
    if fault == "controller" and moment.role == "control":
        act = "kill"
    plan = moment.plan(act)
    here = moment.role == "control"
    arm(bench, None if here else plan)
    command = bench.start(*scenario.arguments, plan=plan if here else None)
    folder = bench.folder if here else bench.host.path(hook.FOLDER)
    if not _reached(folder, command):
        result = command.wait(REACH_LIMIT)
        run.problems.append(f"the moment was not reached; exit status {result.code}: {result.err[-300:]}")
        return run
    watch = Watch(bench.host, PORT, KEY)
    try:
        result = _act_and_settle(bench, run, command, watch, folder, act)
        watch.stop()
        found = bench.look()
        run.tokens_after, run.without_tokens = watch.serving_since(), watch.without_tokens()
        judge_settled(run, before, found, result, bench.bound)
        if fault == "disk":
            bench.host.empty_disk()
        # What concerns the toolkit's own place on the host is seen to when a connection is made.
        outside = cli or moment.step in ("tool", "record")
        repeat = repeat_outside if outside else repeat_inside
        run.again = repeat(bench, scenario, run)
        judge_end(run, before, found, bench.look(), scenario)
    except (ToolkitError, RuntimeError, OSError, ValueError, KeyError) as error:
        run.problems.append(f"{type(error).__name__}: {error}"[:1500])
    finally:
        watch.stop()
        command.kill()
        _end_fault(bench, fault)
    return run


def _reached(folder: Path, command: Running) -> bool:
    end = time.monotonic() + REACH_LIMIT
    while not (folder / "reached").exists():
        if command.poll() is not None:  # what its agent still does comes at once
            end = min(end, time.monotonic() + LINGER)
        if time.monotonic() > end:
            return False
        time.sleep(PAUSE / 3)
    return True


def _act_and_settle(
    bench: Bench, run: Run, command: Running, watch: Watch, folder: Path, act: str
) -> Result | None:
    """Do what the fault is, let the process go on, and wait until nothing moves any more."""
    host, fault = bench.host, run.fault
    begin = time.monotonic()
    if fault == "controller":
        command.kill_controller()
    elif fault == "network":
        host.cut()
        host.root(["sh", "-c", "pkill -KILL -f '^sshd: [d]eploy'"], check=False)
    elif fault == "reboot":
        host.power_cut()
        host.break_connections()
    elif fault == "disk":
        fill(host)
    if act == "hold" and (fault != "reboot" or folder == bench.folder):
        (folder / "go").touch()
    end = begin + bench.bound + SLACK
    result = _settle(bench, command, watch, end, wait_command=fault not in ("controller", "network"))
    run.settled = round(time.monotonic() - begin, 2)
    if fault == "network":
        host.restore()
        host.break_connections()
        result = command.wait(bench.bound + SLACK)
    if fault == "controller":
        command.wait(1.0)
        return None
    return result


def fill(host: Host) -> None:
    """Use up the host's disk to the last page, while others write to it."""
    with host.path(FILLER).open("wb") as file:
        size, piece = 0, 1 << 30
        while piece >= PAGE:
            try:
                os.posix_fallocate(file.fileno(), size, piece)
                size += piece
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2


def _settle(bench: Bench, command: Running, watch: Watch, end: float, *, wait_command: bool) -> Result | None:
    """Until no process of the toolkit works on the host, and its state was the same twice."""
    quiet = 0
    while quiet < 4:
        if time.monotonic() > end:
            raise TimeoutError(f"not settled within the bound; at work: {busy(bench.host)}")
        moving = busy(bench.host) or (wait_command and command.poll() is None) or not watch.seen
        quiet = 0 if moving else quiet + 1
        time.sleep(PAUSE)
    while time.monotonic() < end and watch.now() is None and _should_serve(bench):
        time.sleep(PAUSE)
    return command.wait(1.0) if wait_command else None


def _should_serve(bench: Bench) -> bool:
    """Whether systemd is still starting the server, or it loads."""
    said = bench.host.root(["systemctl", "is-active", f"ddtoolkit-{bench.name}"], check=False).stdout.strip()
    return said in ("active", "activating", "reloading")


def _end_fault(bench: Bench, fault: str) -> None:
    if fault == "network":
        bench.host.restore()
    if fault == "disk" and bench.host.path(FILLER).exists():
        bench.host.empty_disk()
