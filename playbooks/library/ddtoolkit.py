"""Ansible module: asks the toolkit's agent on the host, as the command `ddtoolkit` does from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
---
module: ddtoolkit
short_description: Deploy or change an inference service through the toolkit on the host
description:
  - Runs the toolkit's agent on the host. Lock, releases, history, acceptance and undoing are the same as with
    the command C(ddtoolkit).
  - In check mode, tells what would be done and changes nothing.
options:
  operation:
    description: What to do.
    type: str
    required: true
    choices: [deploy, preflight, doctor, swap, rollback, upgrade, start, stop, restart, uninstall]
  service:
    description: Name of the service, which is the name of its profile.
    type: str
    required: true
  profile:
    description: The resolved profile; needed for C(deploy) and C(preflight).
    type: dict
  sources:
    description: Files that the profile was read from, base64, by name; kept with the release.
    type: dict
    default: {}
  given:
    description: What the profile was resolved from, as it was typed; kept with the release, for next steps.
    type: dict
    default: {}
  secrets:
    description: Values of the secrets that the profile names, by the server's name for each.
    type: dict
    default: {}
  set:
    description: C(key.path=value), each a change for C(swap).
    type: list
    elements: str
    default: []
  release:
    description: The release that C(rollback) goes to; the one before by default.
    type: str
  purge:
    description: With C(uninstall), also remove what no service uses any more.
    type: bool
    default: false
  new_baseline:
    description:
      - Do not compare with the release before; with C(rollback), hold later changes against this judgement of
        the release, not against its first one.
    type: bool
    default: false
  refused:
    description: With C(rollback), go to C(release) although it was refused.
    type: bool
    default: false
  doctor:
    description: What the host is examined for, and what it is loaded with; for C(doctor) and C(preflight).
    type: dict
  ignored:
    description: Checks of the doctor whose failures do not count; the history of a C(deploy) has them.
    type: list
    elements: str
    default: []
  load:
    description: With C(doctor), also measure copies over PCIe and all-reduces, on GPUs that nobody uses.
    type: bool
    default: false
  disruptive:
    description: With I(load), also on GPUs that are in use.
    type: bool
    default: false
  lock_wait:
    description: Seconds to wait for the lock.
    type: float
    default: 0
  who:
    description: Who asks, for lock and history.
    type: str
    required: true
  tool:
    description: Folder of the toolkit's code on the host; the installed one by default.
    type: path
  python:
    description: Interpreter on the host that has its libraries; needed with I(tool).
    type: path
author: ddtoolkit
attributes:
  check_mode:
    support: full
    description: Tells what would be done.
  diff_mode:
    support: full
    description: Shows the changed keys.
"""

EXAMPLES = r"""
- name: Change the tree's size
  ddtoolkit:
    operation: swap
    service: ct200
    set: [speculative.budget=7, speculative.topk_cap=1]
    who: ann@desk
"""

RETURN = r"""
plan:
  description: The steps of a deploy, with their reasons.
  returned: operation is deploy
  type: dict
findings:
  description: Warnings and failures of the doctor, a line each.
  returned: operation is doctor or preflight
  type: list
  elements: str
planned:
  description: The steps that a deploy would take, with their reasons.
  returned: operation is preflight, and there is something to do
  type: list
  elements: str
outcome:
  description: How the change ended; null where there was nothing to do.
  returned: something was changed
  type: dict
release:
  description: The release that is current.
  returned: something was changed
  type: str
"""

AGENT = "/opt/ddtoolkit/bin/ddtoolkit-agent"
GOOD = "committed"
EXAMINED = 180.0  # seconds, far above all that the doctor waits for
BEAT = 5.0  # seconds, as toolkit.remote.protocol has it
PLANNED = ("profile", "sources", "secrets", "given", "service", "who")  # options that a plan depends on


class AgentError(Exception):
    """What the agent answered with, in words."""


class Agent:
    """The agent as a child process that answers JSON lines."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._program = command[0]
        self._answered = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the agent
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                cwd="/",
                env={**os.environ, **environment},
            )
        except OSError as error:
            self._errors.close()
            raise AgentError(said(f"{self._program}: {error.strerror}", self._advice())) from error
        self._writing = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Tell the agent that somebody is there: after a minute of silence it ends, and its locks with it."""
        while self._child.poll() is None:
            time.sleep(BEAT)
            try:
                self._write({"beat": 1})
            except (OSError, ValueError):  # it has ended, or was closed
                return

    def _write(self, message: dict[str, Any]) -> None:
        with self._writing:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()

    def ask(self, operation: str, arguments: dict[str, Any]) -> Any:
        """The answer to one operation."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and why is what it said
            self._write({"op": operation, "args": arguments})
        for line in self._child.stdout:
            message = json.loads(line)
            self._answered = True
            if "result" in message:
                return message["result"]
            if "error" in message:
                raise AgentError(said(message["error"]["message"], message["error"]["hint"]))
        raise AgentError(self._silence())

    def _silence(self) -> str:
        """What is told of an agent that ended; its own words only where it did not even begin."""
        if self._answered:
            return "the agent ended without an answer"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return said(f"no agent runs under {self._program}: {last}", self._advice())

    def _advice(self) -> str:
        if self._program == AGENT:
            return "deploy the service first"
        return (
            "render the settings again, with the host.python that has ddtoolkit[engine] there, or with none"
        )

    def close(self) -> None:
        """Let it end."""
        with self._writing, contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()
        self._errors.close()


def deploy(agent: Agent, given: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Plan; where there is something to do, lock the service and plan what is deployed."""
    wanted = {name: given[name] for name in PLANNED}
    planned = agent.ask("plan", wanted)
    if not check and not planned["plan"]["empty"]:
        agent.ask("reserve", locked(given))
        planned = agent.ask("plan", wanted)
    plan = planned["plan"]
    changes = [f"{item['key']}: {item['old']} -> {item['new']}" for item in plan["changes"]]
    shown = {"changed": not plan["empty"], "plan": plan, "diff": {"prepared": "\n".join(changes)}}
    if check or plan["empty"]:
        return shown
    options = {name: given[name] for name in ("lock_wait", "new_baseline", "ignored")}
    return shown | agent.ask("deploy", {**wanted, **options, "current": planned["current"]})


def locked(given: dict[str, Any]) -> dict[str, Any]:
    """What takes the lock until the agent ends; for a first deploy, a claim that nobody else begins one."""
    words = f"deploy profile {given['service']}"
    return {**{name: given[name] for name in ("service", "who", "profile", "lock_wait")}, "command": words}


def preflight(given: dict[str, Any], command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Let the doctor look before a deploy that has something to do, as it has where no agent can run yet."""
    if not Path(command[0]).exists():
        return examined(given, actions=["provision"], refuse=True)
    agent = Agent(command, environment)
    wanted = {name: given[name] for name in (*PLANNED, "ignored")}
    plan = agent.ask("plan", wanted)["plan"]
    if plan["empty"]:
        agent.close()
        return {"changed": False, "findings": [], "msg": "nothing to do"}
    planned = [f"{step['action']}: {'; '.join(step['reasons'])}" for step in plan["steps"]]
    try:
        report = agent.ask("preflight", {**wanted, "actions": [step["action"] for step in plan["steps"]]})
    except AgentError as error:
        raise AgentError("\n".join([str(error), "what a deploy would do there:", *planned])) from error
    agent.close()
    return {"changed": False, "findings": lines(report), "planned": planned}


def examined(given: dict[str, Any], *, actions: list[str], refuse: bool = False) -> dict[str, Any]:
    """What the doctor finds, run under this module's own Python, which has nothing installed.

    Raises:
        AgentError: something fails that counts; with `refuse` as a deploy says it.
    """
    request = {**given["doctor"]["examination"], "ignored": given["ignored"], "actions": actions}
    limit = EXAMINED
    if refuse:  # what checkpoints have to come is the plan's business
        request["request"] = {**request["request"], "weights": []}
    load = given["doctor"]["load"]
    if given["load"] and load is not None:
        request["load"] = {**load, "disruptive": given["disruptive"]}
        limit += 2 * load["limit"]
    answer = ran([sys.executable, "-P", "-m", "toolkit.doctor"], given["tool"], request, limit)
    if "error" in answer:
        raise AgentError(said(answer["error"], answer["hint"]))
    if refuse and answer["refusal"]:
        raise AgentError(said(*answer["refusal"]))
    if answer["failures"]:
        raise AgentError("\n".join(answer["failures"]))
    return {"changed": False, "findings": lines(answer["report"]), "report": answer["report"]}


def ran(command: list[str], tool: str, request: dict[str, Any], limit: float) -> dict[str, Any]:
    """The last object that a module of the toolkit writes."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONPATH": tool}
    text = json.dumps(request) + "\n"
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=limit,
            cwd="/",
            env=environment,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        raise AgentError(f"the doctor failed: {error}; it needs Python 3.11 or newer") from error
    return answer


def lines(report: dict[str, Any]) -> list[str]:
    """Warnings and failures."""
    found = [item for item in report["findings"] if item["level"] in ("warn", "fail")]
    return [f"{item['level']}: {item['check']}: {item['seen']}" for item in found]


def said(message: str, hint: str | None) -> str:
    """An error with its next step; what the command takes as an option is a variable here."""
    words = (hint or "").replace("--ignore-check", "ddtoolkit_ignore_checks:")
    words = words.replace("--lock-wait", "ddtoolkit_lock_wait")
    return f"{message}; next: {words}" if words else message


def change(agent: Agent, given: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Any other operation."""
    operation = given["operation"]
    names = ("service", "who", "lock_wait", "release", "purge", "new_baseline", "refused")
    wanted = {name: given[name] for name in names}
    wanted["sets"] = given["set"]
    shown: dict[str, Any] = {"changed": True}
    if operation in ("swap", "rollback", "upgrade"):
        preview = agent.ask(f"{operation}_preview", wanted)
        changes = preview["changes"]
        shown = {
            "changed": bool(changes) or operation == "rollback",
            "diff": {"prepared": "\n".join([*changes, *preview.get("notices", ())])},
        }
    if check or not shown["changed"]:
        return shown
    if operation in ("start", "stop", "restart"):
        return shown | agent.ask("change", {**wanted, "verb": operation})
    return shown | agent.ask(operation, wanted)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "operation": {
                "type": "str",
                "required": True,
                "choices": [
                    "deploy",
                    "preflight",
                    "doctor",
                    "swap",
                    "rollback",
                    "upgrade",
                    "start",
                    "stop",
                    "restart",
                    "uninstall",
                ],
            },
            "service": {"type": "str", "required": True},
            "profile": {"type": "dict"},
            "sources": {"type": "dict", "default": {}},
            "given": {"type": "dict", "default": {}},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "set": {"type": "list", "elements": "str", "default": []},
            "release": {"type": "str"},
            "purge": {"type": "bool", "default": False},
            "new_baseline": {"type": "bool", "default": False},
            "refused": {"type": "bool", "default": False},
            "doctor": {"type": "dict"},
            "ignored": {"type": "list", "elements": "str", "default": []},
            "load": {"type": "bool", "default": False},
            "disruptive": {"type": "bool", "default": False},
            "lock_wait": {"type": "float", "default": 0},
            "who": {"type": "str", "required": True},
            "tool": {"type": "path"},
            "python": {"type": "path"},
        },
        required_if=[
            ("operation", "deploy", ("profile",)),
            ("operation", "preflight", ("profile", "doctor", "tool")),
            ("operation", "doctor", ("doctor", "tool")),
            ("operation", "swap", ("set",)),
        ],
        required_together=[("tool", "python")],
        supports_check_mode=True,
    )
    given = module.params
    command, environment = [AGENT], {"LC_ALL": "C.UTF-8"}
    if given["tool"]:
        command = [given["python"], "-P", "-m", "toolkit.hostside"]
        environment["PYTHONPATH"] = given["tool"]
    try:
        if given["operation"] in ("preflight", "doctor"):
            if module.check_mode:
                module.exit_json(changed=False, findings=[], msg="a host is not looked at in check mode")
            looks = given["operation"] == "doctor"
            found = examined(given, actions=[]) if looks else preflight(given, command, environment)
            module.exit_json(**found)
        if module.check_mode and not Path(command[0]).exists():
            module.exit_json(changed=True, msg="nothing of the toolkit is there yet")
        agent = Agent(command, environment)
        work = deploy if given["operation"] == "deploy" else change
        result = work(agent, given, check=module.check_mode)
        agent.close()
    except AgentError as error:
        module.fail_json(msg=str(error))
    outcome = result.get("outcome")
    result.pop("report", None)
    if outcome is not None and outcome["status"] != GOOD:
        hint = f"; next: {outcome['hint']}" if outcome.get("hint") else ""
        module.fail_json(msg=f"{outcome['message']}{hint}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
