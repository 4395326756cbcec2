"""How a host is reached: Ansible's connection variables and the SSH configuration, as `ssh` resolves them.

`ssh -G` (ssh(1)) prints the configuration that OpenSSH, and so Ansible, would use. Taking it from there keeps
paramiko on the same user, port, keys and jump hosts, whatever ~/.ssh/config says.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.inventory.host import Host

_LIMIT = 10.0
_PORTS = range(1, 65536)
_NONE = "none"


@dataclass(frozen=True, slots=True)
class SshOptions:
    """How one host is reached.

    Attributes:
        name: its name for people.
        hostname: address or name to connect to.
        port: TCP port.
        user: user to log in as.
        identity_files: private keys to try, in order.
        use_agent: whether keys of the running agent are tried too.
        known_hosts: files of known host keys; the first is where new ones go.
        key_alias: name under which its key is known; None: its hostname.
        jumps: hosts to go through, the nearest first.
        proxy_command: command that makes the connection; None for a direct one.
    """

    name: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    use_agent: bool
    known_hosts: tuple[Path, ...]
    key_alias: str | None = None
    jumps: tuple[SshOptions, ...] = ()
    proxy_command: str | None = None

    @property
    def known_as(self) -> str:
        """Its name in known_hosts files (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT)."""
        if self.key_alias is not None:
            return self.key_alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"


def ssh_options(host: Host) -> SshOptions:
    """How a host of the inventory is reached.

    Raises:
        ConfigError: the inventory or the SSH configuration asks for what cannot be done here; names each key.
        ToolkitError: `ssh` cannot be run.
    """
    _refuse(host)
    arguments = [word for key in _ARGUMENTS for word in _words(host, key)]
    variables = host.variables
    port = variables.get("ansible_port") or variables.get("ansible_ssh_port")
    if port is not None:
        if not str(port).isdigit() or int(port) not in _PORTS:
            raise _wrong(host, "ansible_port", f"{port!r} is no TCP port")
        arguments += ["-p", str(port)]
    if user := variables.get("ansible_user") or variables.get("ansible_ssh_user"):
        arguments += ["-l", str(user)]
    key = variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file")
    return _resolve(host.name, host.address, arguments, None if key is None else Path(str(key)).expanduser())


def become_root(user: str) -> tuple[str, ...]:
    """Words before a command that is to run as root; none where the SSH user is root."""
    return () if user == "root" else ("sudo", "-n", "-H")


_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")


def _refuse(host: Host) -> None:
    """Refuse what Ansible could do and paramiko, or this tool on purpose, does not."""
    variables = host.variables
    problems = []
    connection = variables.get("ansible_connection") or "ssh"
    if connection not in ("ssh", "smart", "paramiko", "paramiko_ssh"):
        said = f"{connection!r} is not supported; hosts are reached by ssh, this machine by local"
        problems.append(Problem(said, key="ansible_connection", source=host.name))
    for key in _PASSWORDS:
        if variables.get(key):
            said = "passwords are not used; log in with a key (ansible_ssh_private_key_file, or an agent)"
            problems.append(Problem(said, key=key, source=host.name))
    method = variables.get("ansible_become_method") or "sudo"
    if method not in ("sudo", "ansible.builtin.sudo"):
        said = f"{method!r} is not supported; the user needs `sudo -n`"
        problems.append(Problem(said, key="ansible_become_method", source=host.name))
    user = variables.get("ansible_become_user") or "root"
    if user != "root":
        said = f"{user!r}: system units are root's; become root or leave it out"
        problems.append(Problem(said, key="ansible_become_user", source=host.name))
    if problems:
        raise ConfigError(problems)


def _words(host: Host, key: str) -> list[str]:
    value = host.variables.get(key)
    if not value:
        return []
    try:
        return shlex.split(str(value))
    except ValueError as error:
        raise _wrong(host, key, f"cannot be split into words: {error}") from None


def _wrong(host: Host, key: str, message: str) -> ConfigError:
    return ConfigError([Problem(message, key=key, source=host.name)])


def _resolve(name: str, address: str, arguments: list[str], key: Path | None) -> SshOptions:
    found = _configuration(name, address, arguments)
    if unable := _unable(found):
        raise ConfigError([Problem(message, key=option, source=name) for option, message in unable])
    jump = _one(found, "proxyjump")
    command = _one(found, "proxycommand")
    files = [Path(item).expanduser() for item in found.get("identityfile", [])]
    agent = _one(found, "identitiesonly") != "yes" and _one(found, "identityagent") != _NONE
    return SshOptions(
        name=name,
        hostname=_one(found, "hostname") or address,
        port=int(_one(found, "port") or 22),
        user=_one(found, "user") or "",
        identity_files=tuple(dict.fromkeys([key, *files] if key is not None else files)),
        use_agent=agent,
        known_hosts=_known_hosts(found),
        key_alias=_one(found, "hostkeyalias"),
        jumps=() if jump in (None, _NONE) else _jumps(str(jump), arguments),
        proxy_command=None if command in (None, _NONE) else command,
    )


def _configuration(name: str, address: str, arguments: list[str]) -> dict[str, list[str]]:
    if address.startswith("-"):
        raise ConfigError([Problem(f"{address!r} is no host name", key="ansible_host", source=name)])
    try:
        done = subprocess.run(
            [shutil.which("ssh") or "/usr/bin/ssh", "-G", *arguments, "--", address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "install the OpenSSH client: apt-get install openssh-client"
        raise ToolkitError(f"ssh cannot be run: {error}", hint=hint) from error
    if done.returncode != 0:
        reason = "; ".join(done.stderr.split("\n")).strip("; ") or "ssh -G refuses it"
        raise ConfigError([Problem(reason, key="ansible_ssh_common_args", source=name)])
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def _one(found: Mapping[str, list[str]], key: str) -> str | None:
    values = found.get(key)
    return values[0] if values else None


def _unable(found: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """What the configuration asks for and paramiko cannot do: option and message."""
    cannot = {
        "pkcs11provider": "keys on PKCS#11 tokens cannot be used; add the token to an ssh-agent",
        "certificatefile": "user certificates cannot be used; log in with a plain key",
    }
    unable = [(key, said) for key, said in cannot.items() if _one(found, key) not in (None, _NONE)]
    if _one(found, "proxyusefdpass") == "yes":
        unable.append(("proxyusefdpass", "cannot be used; let the ProxyCommand carry the data"))
    return unable


def _known_hosts(found: Mapping[str, list[str]]) -> tuple[Path, ...]:
    names: list[str] = []
    for key in ("userknownhostsfile", "globalknownhostsfile"):
        names += [name for value in found.get(key, []) for name in shlex.split(value)]
    return tuple(Path(name).expanduser() for name in names if name != _NONE)


def _jumps(text: str, arguments: list[str]) -> tuple[SshOptions, ...]:
    """The hosts of a ProxyJump list; each takes its own part of the SSH configuration (ssh_config(5))."""
    config = [word for pair in _pairs(arguments, "-F") for word in pair]
    hops = []
    for item in text.split(","):
        spec = item.removeprefix("ssh://")
        user, _, place = spec.rpartition("@")
        host, port = _split_port(place)
        own = [*config, *(["-l", user] if user else []), *(["-p", port] if port else [])]
        hops.append(_resolve(host, host, own, None))
    return tuple(hops)


def _pairs(words: list[str], option: str) -> list[tuple[str, str]]:
    return [(option, words[i + 1]) for i, word in enumerate(words[:-1]) if word == option]


def _split_port(place: str) -> tuple[str, str]:
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = place.rpartition(":")
    return (host, port) if host and port.isdigit() else (place, "")
