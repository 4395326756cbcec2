"""Reading an inventory through Ansible's own commands, in memory only.

`ansible-inventory --list` resolves groups, group_vars and dynamic sources, but leaves templates and vault
values as they are written. Where a value that matters holds one, Ansible's debug module resolves it on the
control machine; nothing is sent to a host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.inventory.host import HOOKS, PEER_ADDRESS, PEER_PORT, PROFILES, Host, host_from

_LIMIT = 60.0
_SOME_FAILED = 2  # exit status of `ansible` when a host failed
_KEPT = ("HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "SSH_AUTH_SOCK")
_ANSIBLE_KEPT = ("ANSIBLE_VAULT_PASSWORD_FILE", "ANSIBLE_VAULT_IDENTITY_LIST")
# What the toolkit reads of a host; everything else stays Ansible's business.
KEYS = (
    "ansible_host", "ansible_ssh_host", "ansible_port", "ansible_ssh_port", "ansible_user",
    "ansible_ssh_user", "ansible_connection", "ansible_ssh_private_key_file", "ansible_private_key_file",
    "ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args", "ansible_password",
    "ansible_ssh_pass", "ansible_ssh_password", "ansible_become", "ansible_become_method",
    "ansible_become_user", "ansible_become_password", "ansible_become_pass", "ansible_become_exe",
    "ansible_become_flags", "ansible_python_interpreter", PROFILES, *HOOKS, PEER_ADDRESS, PEER_PORT,
)  # fmt: skip
_ENTRY = re.compile(r"^(\S+) \| (\w+!?) => ", re.MULTILINE)


def load_hosts(sources: Sequence[Path], *, limit: str | None = None) -> list[Host]:
    """The hosts of inventories, merged as Ansible merges them.

    Args:
        sources: files, folders or executable dynamic sources.
        limit: Ansible host pattern; None: all.

    Raises:
        ConfigError: an inventory is wrong, or nothing matches; says what Ansible said.
        ToolkitError: Ansible cannot be run.
    """
    for source in sources:
        if not source.exists():
            raise ConfigError(f"{source}: there is no such inventory", hint="see inventory.example.yaml")
    where = [option for source in sources for option in ("-i", str(source))]
    narrowed = [] if limit is None else ["--limit", limit]
    listed = _run("ansible-inventory", [*where, "--list", *narrowed], sources)
    try:
        data = json.loads(listed)
        raw: dict[str, dict[str, Any]] = data["_meta"]["hostvars"]
        names = sorted(_members(data, "all"))
    except (ValueError, KeyError, TypeError) as error:
        raise ToolkitError(f"ansible-inventory gave no inventory: {error}") from error
    if not names:
        pattern = f"--limit {limit} matches no host of" if limit else "there is no host in"
        raise ConfigError(f"{pattern} {', '.join(map(str, sources))}")
    variables = {name: _of_interest(raw.get(name, {})) for name in names}
    if any(_unresolved(values) for values in variables.values()):
        variables = _resolved(where, narrowed, names, sources)
    hosts, problems = [], []
    for name in names:
        host, wrong = host_from(name, variables[name])
        hosts.append(host)
        problems += wrong
    if problems:
        raise ConfigError(problems)
    return hosts


def ansible_environment() -> dict[str, str]:
    """What Ansible sees of the caller's environment: an allowlist, a fixed locale, no colours."""
    kept = {name: os.environ[name] for name in (*_KEPT, *_ANSIBLE_KEPT) if name in os.environ}
    scripts = str(Path(sys.executable).parent)
    return {
        **kept,
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True",
    }


def _run(
    program: str, arguments: list[str], sources: Sequence[Path], *, allowed: Sequence[int] = (0,)
) -> str:
    # No terminal and no standard input: a vault password must come from a file, never from a prompt.
    try:
        done = subprocess.run(
            [str(Path(sys.executable).parent / program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=ansible_environment(),
            timeout=_LIMIT,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolkitError(f"{program} cannot be run: {error}", hint="reinstall ddtoolkit") from error
    if done.returncode not in allowed:
        raise ConfigError(f"{', '.join(map(str, sources))}: {_reason(done.stderr or done.stdout)}")
    return done.stdout


def _reason(said: str) -> str:
    """The first lines of what Ansible says that tell where and why, on one line."""
    lines = [re.sub(r"^\[(WARNING|ERROR)\]: ", "", line.strip()) for line in said.splitlines()]
    noise = ("Failed to parse", "<<<", "(source", "Could not match", "Completely failed")
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(noise))
    return "; ".join(kept)[:400] or "Ansible cannot read it"


def _members(data: Mapping[str, Any], group: str) -> set[str]:
    entry = data.get(group, {})
    found = set(entry.get("hosts", ()))
    for child in entry.get("children", ()):
        found |= _members(data, child)
    return found


def _of_interest(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in KEYS if key in values}


def _unresolved(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "__ansible_vault" in value or any(_unresolved(item) for item in value.values())
    if isinstance(value, list):
        return any(_unresolved(item) for item in value)
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def _resolved(
    where: list[str], narrowed: list[str], names: list[str], sources: Sequence[Path]
) -> dict[str, dict[str, Any]]:
    pairs = ", ".join(f"{key!r}: {key} | default(none)" for key in KEYS if key != "ansible_connection")
    pairs += ", 'ansible_connection': hostvars[inventory_hostname].ansible_connection | default(none)"
    # The debug module runs on the control machine whatever the host's connection is.
    message = json.dumps({"msg": "{{ {" + pairs + "} | to_json }}"})
    options = [*where, *narrowed, "all", "-m", "ansible.builtin.debug", "-a", message]
    said = _run("ansible", options, sources, allowed=(0, _SOME_FAILED))
    found: dict[str, dict[str, Any]] = {}
    problems = []
    for match in _ENTRY.finditer(said):
        body, _ = json.JSONDecoder().raw_decode(said[match.end() :])
        if match[2] != "SUCCESS":
            problems.append(Problem(str(body.get("msg", "cannot be resolved")), source=match[1]))
            continue
        values = json.loads(body["msg"])
        found[match[1]] = {key: value for key, value in values.items() if value is not None}
    if problems:
        raise ConfigError(problems)
    if absent := [name for name in names if name not in found]:
        raise ToolkitError(f"Ansible resolved no variables of {', '.join(absent)}")
    return found
