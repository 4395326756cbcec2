"""Ansible module: asks the toolkit's agent on the host, as the command `ddtoolkit` does from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
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
    choices: [deploy, swap, rollback, start, stop, restart, uninstall]
  service:
    description: Name of the service, which is the name of its profile.
    type: str
    required: true
  profile:
    description: The resolved profile; needed for C(deploy).
    type: dict
  sources:
    description: Files that the profile was read from, base64, by name; kept with the release.
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
BEAT = 5.0  # seconds, as toolkit.hostside.protocol has it


class AgentError(Exception):
    """What the agent answered with, in words."""


class Agent:
    """The agent as a child process that answers JSON lines."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd="/",
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise AgentError(f"{command[0]}: {error.strerror}; deploy the service first") from error
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
        self._write({"op": operation, "args": arguments})
        for line in self._child.stdout:
            message = json.loads(line)
            if "result" in message:
                return message["result"]
            if "error" in message:
                error = message["error"]
                hint = f"; next: {error['hint']}" if error["hint"] else ""
                raise AgentError(f"{error['message']}{hint}")
        raise AgentError("the agent ended without an answer")

    def close(self) -> None:
        """Let it end."""
        with self._writing:
            self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()


def deploy(agent: Agent, given: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Plan, then deploy what is planned."""
    wanted = {"profile": given["profile"], "sources": given["sources"], "secrets": given["secrets"]}
    wanted |= {"service": given["service"], "who": given["who"]}
    planned = agent.ask("plan", wanted)
    plan = planned["plan"]
    changes = [f"{item['key']}: {item['old']} -> {item['new']}" for item in plan["changes"]]
    shown = {"changed": not plan["empty"], "plan": plan, "diff": {"prepared": "\n".join(changes)}}
    if check or plan["empty"]:
        return shown
    options = {"lock_wait": given["lock_wait"], "new_baseline": given["new_baseline"]}
    return shown | agent.ask("deploy", {**wanted, **options, "current": planned["current"]})


def change(agent: Agent, given: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Any other operation."""
    operation = given["operation"]
    wanted = {
        name: given[name] for name in ("service", "who", "lock_wait", "release", "purge", "new_baseline")
    }
    wanted["sets"] = given["set"]
    shown: dict[str, Any] = {"changed": True}
    if operation in ("swap", "rollback"):
        changes = agent.ask(f"{operation}_preview", wanted)["changes"]
        shown = {
            "changed": bool(changes) or operation == "rollback",
            "diff": {"prepared": "\n".join(changes)},
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
                "choices": ["deploy", "swap", "rollback", "start", "stop", "restart", "uninstall"],
            },
            "service": {"type": "str", "required": True},
            "profile": {"type": "dict"},
            "sources": {"type": "dict", "default": {}},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "set": {"type": "list", "elements": "str", "default": []},
            "release": {"type": "str"},
            "purge": {"type": "bool", "default": False},
            "new_baseline": {"type": "bool", "default": False},
            "lock_wait": {"type": "float", "default": 0},
            "who": {"type": "str", "required": True},
            "tool": {"type": "path"},
            "python": {"type": "path"},
        },
        required_if=[("operation", "deploy", ("profile",)), ("operation", "swap", ("set",))],
        required_together=[("tool", "python")],
        supports_check_mode=True,
    )
    given = module.params
    command, environment = [AGENT], {"LC_ALL": "C.UTF-8"}
    if given["tool"]:
        command = [given["python"], "-P", "-m", "toolkit.hostside"]
        environment["PYTHONPATH"] = given["tool"]
    if module.check_mode and not Path(command[0]).exists():
        module.exit_json(changed=True, msg="nothing of the toolkit is there yet")
    try:
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
