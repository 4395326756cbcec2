"""The commands that follow a fault: they must work, and need no hand's help."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.faults.bench import KEY, NAME, PYTHON, Bench
from tests.faults.scenarios import DEPLOY, SETS, Scenario
from toolkit.errors import ConfigError
from toolkit.inventory.host import Host
from toolkit.remote.agent import Agent, _Pipes

if TYPE_CHECKING:
    from tests.faults.strike import Run

LIMIT = 90.0


def repeat_outside(bench: Bench, scenario: Scenario, run: Run) -> str:
    """`status`, then the same change again, over SSH."""
    status = bench.command("status", NAME, "--json")
    if run.serving == "none" and run.outcome is None:
        # Nothing is deployed there, nor has anything of the toolkit said which interpreter would have it.
        if status.code not in (0, 1, 2) or (status.code and not status.err.strip()):
            run.problems.append(f"status: exit status {status.code}: {status.err[-400:]}")
    elif status.code != 0:
        run.problems.append(f"status: exit status {status.code}: {status.err[-400:]}")
    else:
        item = next(iter(json.loads(status.out)["hosts"].values()))["result"]
        judge_status(run, item[0] if item else {"state": "absent"})
    done = bench.command(*scenario.repeat)
    wanted = 5 if scenario.outcome == "rolled_back" else 0
    if done.code != wanted:
        run.problems.append(f"the next command: exit status {done.code}: {done.err[-600:]}")
    if "Traceback" in done.err + status.err or KEY in done.out + done.err + status.out + status.err:
        run.problems.append(f"the next command said: {done.err[-600:]}")
    value = next(iter(json.loads(done.out)["hosts"].values()), {}) if done.out.strip() else {}
    outcome = (value.get("result") or {}).get("outcome") or {}
    return str(outcome.get("status", "nothing to do"))


def repeat_inside(bench: Bench, scenario: Scenario, run: Run) -> str:
    """The same through the host's agent, started there."""
    tools = bench.host.root(["sh", "-c", "ls -d /opt/ddtoolkit/tool/*/"], check=False).stdout.split()
    if not tools or scenario.base == "bare":
        return repeat_outside(bench, scenario, run)
    with agent(bench, tools[0]) as ask:
        status = ask("status", {"service": NAME}, fails_as=[])
        judge_status(run, status[0] if status else {"state": "absent"})
        profile = None if scenario.repeat[0] == "swap" else desired(bench)["profile"]
        ask("reserve", {"service": NAME, "command": "again", "lock_wait": 0, "profile": profile})
        return _change(bench, ask, scenario, run)


def _change(bench: Bench, ask: Any, scenario: Scenario, run: Run) -> str:
    if scenario.repeat[0] == "swap":
        args = {"service": NAME, "sets": [scenario.repeat[3]], "lock_wait": 0}
        if not ask("swap_preview", args)["changes"]:
            return "nothing to do"
        done = ask("swap", args)
    else:
        args = desired(bench)
        planned = ask("plan", args)
        if planned["plan"]["empty"]:
            return "nothing to do"
        args |= {"lock_wait": 0, "current": planned["current"], "service": NAME, "new_baseline": False}
        done = ask("deploy", args)
    status = str(done["outcome"]["status"])
    if status != scenario.outcome:
        run.problems.append(f"the next command: {status}: {done['outcome']['message']}")
    return status


def judge_status(run: Run, item: dict[str, Any]) -> None:
    """What `status` says must be what is."""
    wrong = run.problems.append
    change = item.get("transaction")
    if run.serving == "none":
        if item["state"] not in ("stopped", "absent"):
            wrong(f"status says {item['state']}, while nothing serves")
        if run.outcome is not None and (change is None or change["outcome"] != run.outcome):
            wrong(f"status does not tell of the failed deploy: {change}")
        return
    if item["state"] != "running" or not item["healthy"]:
        wrong(f"status says {item['state']}, healthy {item['healthy']}, while {run.serving} serves")
    if item["warnings"]:
        wrong(f"status warns: {item['warnings']}")


def desired(bench: Bench) -> dict[str, Any]:
    """The profile as an agent gets it."""
    from toolkit.fleet import deploy
    from toolkit.profile.loading import load_profile

    os.environ["SERVER_KEY"] = KEY
    return deploy.desired(
        load_profile(NAME, overlays=[], sets=[item.format(limit=bench.limit) for item in SETS])
    ).args()


@contextlib.contextmanager
def agent(bench: Bench, tool: str) -> Iterator[Any]:
    """Asks an agent that was started on the host without SSH."""
    command = ["nsenter", f"--target={bench.host.leader()}", "--all", "--root", "--wd", "env", "-i",
               "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", f"PYTHONPATH={tool}",
               PYTHON, "-P", "-m", "toolkit.hostside"]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked = Agent(Host(bench.host.name), _Pipes(child), "")

        def ask(operation: str, args: dict[str, Any], fails_as: Any = None) -> Any:
            try:
                return asked.call(operation, {**args, "who": "ann@desk"})
            except ConfigError:
                if fails_as is None:
                    raise
                return fails_as

        with asked.beating():
            yield ask
        child.stdin.close()
        child.stdout.read()  # it gives its locks back before it ends


__all__ = ["DEPLOY", "repeat_inside", "repeat_outside"]
