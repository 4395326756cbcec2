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
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.inventory import said
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
_DEFINED = " is defined"
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
            raise ConfigError(f"{source}: there is no such inventory", hint=said.EXAMPLE)
        if not source.is_file() and not source.is_dir():
            # Ansible reads a source more than once, and waits for what a pipe never says again.
            raise ConfigError(f"{source}: is no file and no folder", hint="write the inventory into a file")
    where = [option for source in sources for option in ("-i", str(source))]
    narrowed = [] if limit is None else ["--limit", limit]
    listed, warned = _run("ansible-inventory", [*where, "--list", *narrowed], sources)
    if limit is not None and (unknown := said.unmatched(warned)):
        known = _known(_run("ansible-inventory", [*where, "--list"], sources)[0])
        raise refused([said.limit_problem(limit, unknown, known)])
    try:
        data = json.loads(listed)
        raw: dict[str, dict[str, Any]] = data["_meta"]["hostvars"]
        names = sorted(_members(data, "all"))
    except (ValueError, KeyError, TypeError) as error:
        raise ToolkitError(f"ansible-inventory gave no inventory: {error}") from error
    if not names:
        pattern = f"--limit {limit} matches no host of" if limit else "there is no host in"
        skipped = said.skipped(warned)
        detail = f" (Ansible: skipping {skipped})" if skipped else ""
        raise ConfigError(f"{pattern} {', '.join(map(str, sources))}{detail}", hint=said.EXAMPLE)
    variables = {name: _of_interest(raw.get(name, {})) for name in names}
    if any(_unresolved(values) for values in variables.values()):
        variables = _resolved(where, narrowed, variables, sources)
    hosts, problems = [], []
    for name in names:
        host, wrong = host_from(name, variables[name])
        hosts.append(replace(host, inventory=tuple(sources)))
        problems += wrong
    if problems:
        raise ConfigError(problems)
    return hosts


def refused(problems: Sequence[Problem]) -> ConfigError:
    """The error of these problems; the next step of a single one is told as such."""
    if len(problems) == 1:
        return ConfigError([replace(problems[0], hint=None)], hint=problems[0].hint)
    return ConfigError(problems)


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
) -> tuple[str, str]:
    """What a command of Ansible's prints, and what it says besides."""
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
    except subprocess.TimeoutExpired as error:
        raise ToolkitError(
            f"{', '.join(map(str, sources))}: {program} has no answer after {_LIMIT:.0f} s",
            hint="does a script or a lookup of the inventory hang? run it by hand: "
            f"ansible-inventory {' '.join(arguments[:2])} --list",
        ) from error
    except OSError as error:
        raise ToolkitError(f"{program} cannot be run: {error}", hint="reinstall ddtoolkit") from error
    if done.returncode not in allowed:
        raise refused(said.unreadable(done.stderr or done.stdout, sources))
    return done.stdout, done.stderr


def _known(listed: str) -> set[str]:
    """Names of all hosts and groups."""
    try:
        data = json.loads(listed)
        return {*data["_meta"]["hostvars"], *_members(data, "all"), *(set(data) - {"_meta"})}
    except (ValueError, KeyError, TypeError):
        return set()


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
    where: list[str], narrowed: list[str], raw: Mapping[str, dict[str, Any]], sources: Sequence[Path]
) -> dict[str, dict[str, Any]]:
    """The variables with their templates and vault values resolved.

    Args:
        where: options that name the inventory.
        narrowed: options that name the hosts.
        raw: the variables by host, as they are written.
        sources: the inventory.

    Raises:
        ConfigError: a template gives no value.
    """
    # `default(omit)` says that there is none; a template that fails, that something is wrong.
    value = "({0} if {0} is defined and {0} != omit else none)"
    pairs = ", ".join(
        f"{key!r}: {value.format(key)}, '{key}{_DEFINED}': {key} is defined"
        for key in KEYS
        if key != "ansible_connection"
    )
    pairs += ", 'ansible_connection': hostvars[inventory_hostname].ansible_connection | default(none)"
    # The debug module runs on the control machine whatever the host's connection is.
    message = json.dumps({"msg": "{{ {" + pairs + "} | to_json }}"})
    options = [*where, *narrowed, "all", "-m", "ansible.builtin.debug", "-a", message]
    answered, _ = _run("ansible", options, sources, allowed=(0, _SOME_FAILED))
    found: dict[str, dict[str, Any]] = {}
    problems = []
    for match in _ENTRY.finditer(answered):
        name = match[1]
        body, _ = json.JSONDecoder().raw_decode(answered[match.end() :])
        if match[2] != "SUCCESS":
            problems += _unresolvable(name, raw[name], str(body.get("msg", "")), sources)
            continue
        values = json.loads(body["msg"])
        found[name] = {key: values[key] for key in KEYS if values.get(key) is not None}
        problems += [
            said.unresolved(name, key, str(text), "", sources)
            for key, text in raw[name].items()
            if _unresolved(text) and not values.get(f"{key}{_DEFINED}", True)
        ]
    if problems:
        raise refused(problems)
    if absent := [name for name in raw if name not in found]:
        raise ToolkitError(f"Ansible resolved no variables of {', '.join(absent)}")
    return found


def _unresolvable(host: str, raw: Mapping[str, Any], words: str, sources: Sequence[Path]) -> list[Problem]:
    """The variables of a host that Ansible could not resolve; it names none of them."""
    templates = {key: text for key, text in raw.items() if isinstance(text, str) and _unresolved(text)}
    named = {key: text for key, text in templates.items() if _mentions(words, text)} or templates
    if not named:
        return [Problem(words or "cannot be resolved", source=host)]
    return [said.unresolved(host, key, text, words, sources) for key, text in named.items()]


def _mentions(words: str, text: str) -> bool:
    """Whether Ansible speaks of this template: it quotes the variable that is not defined."""
    return any(name in text for name in re.findall(r"'(\w+)' is undefined", words))
