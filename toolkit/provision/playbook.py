"""Running the bundled playbooks through ansible-runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, UnreachableError
from toolkit.inventory.commands import pasteable
from toolkit.inventory.host import Host
from toolkit.resources import bundled

# Ansible sees these and nothing else of the caller's environment.
_ALLOWED = (
    "HOME", "USER", "LOGNAME", "TERM", "TMPDIR", "TZ", "SSH_AUTH_SOCK",
    "ANSIBLE_VAULT_PASSWORD_FILE", "ANSIBLE_VAULT_IDENTITY_LIST",
)  # fmt: skip
_SSH = (
    "-C -o ControlMaster=auto -o ControlPersist=60s -o BatchMode=yes -o StrictHostKeyChecking=yes "
    "-o HostKeyAlgorithms=ssh-ed25519 -o ServerAliveInterval=10 -o ServerAliveCountMax=3"
)

# This very code, wherever it was loaded from. By PYTHONPATH it would reach Ansible's modules, too.
_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from toolkit.provision.child import main; main()"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How one task ended on one host.

    Attributes:
        task: its name.
        host: the host.
        outcome: ok, changed, skipped, failed or unreachable.
        message: what Ansible says of it, "" where it says nothing.
        diff: what it changed or, in check mode, would change, where Ansible tells.
    """

    task: str
    host: str
    outcome: str
    message: str
    diff: str = ""

    def to_json(self) -> dict[str, str]:
        """As a JSON object."""
        return asdict(self)


def run_local(
    playbook: str,
    settings: dict[str, Any],
    *,
    on_task: Callable[[TaskResult], None] | None = None,
    check: bool = False,
    timeout: float = 900.0,
    idle_timeout: float = 360.0,
) -> list[TaskResult]:
    """Run a bundled playbook on this machine, without SSH and without becoming another user.

    Args:
        playbook: file name below `playbooks`, such as `provision.yml`.
        settings: the playbook's values; read there as data, never evaluated as templates.
        on_task: called with each task's result as it ends.
        check: change nothing, only see what would be.
        timeout: seconds for the whole run.
        idle_timeout: seconds without any output before the run is ended; longer than the dpkg lock wait.

    Returns:
        The result of every task, in order.

    Raises:
        ToolkitError: a task failed or the run was ended; the message has the task and its reason.
    """
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    target = {"inventory": {"all": {"hosts": {"localhost": local}}}}
    manner = {"check": check, "timeout": int(timeout), "idle_timeout": int(idle_timeout)}
    end, results, trouble = _run({"playbook": playbook, "settings": settings, **target, **manner}, on_task)
    _raise_for(playbook, end, results, trouble)
    return results


def run_on_hosts(
    playbook: str,
    settings: dict[str, Any],
    inventory: Sequence[Path],
    hosts: Sequence[str],
    *,
    on_task: Callable[[TaskResult], None] | None = None,
    check: bool = False,
    extra_vars: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
    idle_timeout: float = 600.0,
) -> dict[str, ToolkitError]:
    """Run a bundled playbook as root on hosts of an inventory, through the OpenSSH client.

    Host keys are checked: an unknown one, or another than ed25519, is an unreachable host.

    Args:
        playbook: file name below `playbooks`.
        settings: the playbook's values, the same on every host.
        inventory: the inventory's files, folders or dynamic sources.
        hosts: the hosts that it is to run on.
        on_task: called with each task's result as it ends.
        check: change nothing, only see what would be.
        extra_vars: further variables of the playbook, which Ansible evaluates: never a user's values.
        timeout: seconds for the whole run.
        idle_timeout: seconds without any output before the run is ended.

    Returns:
        What went wrong, by host; empty when every host succeeded.

    Raises:
        ToolkitError: Ansible did not run to its end.
    """
    request = {
        "playbook": playbook,
        "settings": settings,
        "inventory": [str(path.absolute()) for path in inventory],
        "limit": ",".join(hosts),
        "become": True,
        "check": check,
        "extra_vars": dict(extra_vars or {}),
        "timeout": int(timeout),
        "idle_timeout": int(idle_timeout),
    }
    end, results, trouble = _run(request, on_task)
    bad = [result for result in results if result.outcome in ("failed", "unreachable")]
    if not bad:
        _raise_for(playbook, end, results, trouble)
    return {result.host: _failure(playbook, result, inventory) for result in bad}


def _failure(playbook: str, result: TaskResult, inventory: Sequence[Path]) -> ToolkitError:
    said = pasteable(result.message, Host(result.host, inventory=tuple(inventory)))
    message = f"{result.host}: {playbook}: task '{result.task}' {result.outcome}: {said}"
    if result.outcome == "unreachable":
        return UnreachableError(message, hint=f"ssh to {result.host} by hand and see what it says")
    return ToolkitError(message, hint="mend what the message names, then run the same command again")


def _run(
    request: dict[str, Any], on_task: Callable[[TaskResult], None] | None
) -> tuple[dict[str, Any], list[TaskResult], str]:
    """One run in a process of its own: its last word, every task's result, and what it complained of."""
    request = {"project": str(bundled("playbooks")), "extra_vars": {}, **request}
    results: list[TaskResult] = []
    end: dict[str, Any] = {}
    # Errors go to a file: a full pipe that nobody reads would stop the child.
    with tempfile.TemporaryFile(mode="w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(),
        )
        with child:
            # Both pipes are always there: Popen was told so.
            assert child.stdin is not None  # noqa: S101
            assert child.stdout is not None  # noqa: S101
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                if not line.startswith("{"):
                    continue
                event = json.loads(line)
                if "status" in event:
                    end = event
                    continue
                results.append(TaskResult(**event))
                if on_task is not None:
                    on_task(results[-1])
        errors.seek(0)
        trouble = errors.read()
    return end, results, trouble


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ALLOWED if name in os.environ}
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    # C.UTF-8 is always there, whatever the caller's locale says.
    return {
        **kept,
        "PATH": path,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_CONFIG": str(bundled("playbooks") / "ansible.cfg"),
        "ANSIBLE_SSH_ARGS": _SSH,
        "ANSIBLE_PIPELINING": "True",
        "ANSIBLE_TIMEOUT": "15",
    }


def _raise_for(playbook: str, end: dict[str, Any], results: list[TaskResult], trouble: str) -> None:
    if end.get("status") == "successful":
        return
    bad = [result for result in results if result.outcome in ("failed", "unreachable")]
    if bad:
        message = f"{playbook}: task '{bad[-1].task}' on {bad[-1].host} {bad[-1].outcome}: {bad[-1].message}"
    elif end.get("status") == "timeout":
        message = f"{playbook}: ended after its time limit"
    else:
        message = f"{playbook}: ansible did not finish: {(end.get('output') or trouble).strip()[-1500:]}"
    raise ToolkitError(message, hint="mend what the message names, then run the same command again")
