"""One host of an inventory, and which profiles it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, Problem

PROFILES = "ddtoolkit_profiles"
_SHOWN = 5
HOOKS = ("ddtoolkit_drain", "ddtoolkit_undrain")
PEER_ADDRESS, PEER_PORT = "ddtoolkit_peer_address", "ddtoolkit_peer_port"


@dataclass(frozen=True, slots=True)
class Host:
    """A host.

    Attributes:
        name: its name in the inventory.
        variables: connection variables of Ansible, templates and vault values resolved; may hold secrets,
            so it is never shown.
        profiles: profiles that it carries.
        drain: command that takes it out of the load balancer, run on the control machine; None for nothing.
        undrain: command that puts it back.
        inventory: the files, folders or dynamic sources that name it, as they were given; empty for none.
    """

    name: str
    variables: Mapping[str, Any] = field(repr=False, default_factory=dict)
    profiles: tuple[str, ...] = ()
    drain: tuple[str, ...] | None = None
    undrain: tuple[str, ...] | None = None
    inventory: tuple[Path, ...] = ()

    @property
    def local(self) -> bool:
        """Whether it is this machine, reached without SSH."""
        return self.variables.get("ansible_connection") == "local"

    @property
    def peer_address(self) -> str:
        """What other hosts connect to when they fetch a checkpoint from it."""
        return str(self.variables.get(PEER_ADDRESS) or self.address)

    @property
    def peer_port(self) -> int:
        """TCP port on which it hands out checkpoints; 0 for a free one."""
        return int(self.variables.get(PEER_PORT) or 0)

    @property
    def address(self) -> str:
        """What SSH connects to."""
        given = self.variables.get("ansible_host") or self.variables.get("ansible_ssh_host")
        return str(given or self.name)


def host_from(name: str, variables: Mapping[str, Any]) -> tuple[Host, list[Problem]]:
    """A host from its variables, and what is wrong with the toolkit's own ones."""
    problems: list[Problem] = []
    profiles = variables.get(PROFILES)
    if profiles is None:
        profiles = []
    if isinstance(profiles, str):
        profiles = [profiles]
    if not isinstance(profiles, list) or not all(isinstance(item, str) for item in profiles):
        said = f"is {profiles!r}; write a list of profile names"
        problems.append(Problem(said, key=PROFILES, source=name))
        profiles = []
    port = variables.get(PEER_PORT)
    if port is not None and not (str(port).isdecimal() and 0 < int(port) < 65536):
        problems.append(Problem(f"is {port!r}; write a TCP port, 1 to 65535", key=PEER_PORT, source=name))
    drain, undrain = (_command(name, key, variables.get(key), problems) for key in HOOKS)
    return Host(name, variables, tuple(profiles), drain, undrain), problems


def hosts_with(hosts: Sequence[Host], profile: str, *, limit: str | None) -> list[Host]:
    """The hosts that carry a profile, in order of name.

    Raises:
        ConfigError: none does; says what the hosts carry instead. Or two names lead to the same place, where
            one change would meet the other.
    """
    found = sorted((host for host in hosts if profile in host.profiles), key=lambda host: host.name)
    if found:
        _refuse_twice(found)
        return found
    carried = "; ".join(f"{host.name}: {', '.join(host.profiles) or 'none'}" for host in hosts[:10])
    among = f" matched by --limit {limit}" if limit else ""
    raise ConfigError(
        f"no host{among} lists profile {profile!r} in {PROFILES} ({carried or 'the inventory has no hosts'})",
        hint=f"add {profile} to {PROFILES} of the hosts that are to carry it",
    )


def only_profile(hosts: Sequence[Host], *, limit: str | None) -> str:
    """The profile that a command is about which names none: the only one that the hosts carry.

    Raises:
        ConfigError: they carry several, or none; says which.
    """
    carrying: dict[str, list[str]] = {}
    for host in hosts:
        for profile in host.profiles:
            carrying.setdefault(profile, []).append(host.name)
    if len(carrying) == 1:
        return next(iter(carrying))
    among = f" matched by --limit {limit}" if limit else " of the inventory"
    if not carrying:
        raise ConfigError(f"no host{among} lists any profile in {PROFILES}", hint=f"add it to {PROFILES}")
    choices = "; ".join(f"{name}: {_some(on)}" for name, on in sorted(carrying.items()))
    raise ConfigError(
        f"the hosts{among} carry several profiles ({choices})",
        hint=f"name one of them: {', '.join(sorted(carrying))}",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(sorted(names)[:_SHOWN])}{more}"


def _refuse_twice(hosts: Sequence[Host]) -> None:
    names: dict[tuple[str, ...], str] = {}
    for host in hosts:
        first = names.setdefault(_place(host), host.name)
        if first != host.name:
            raise ConfigError(
                f"{first} and {host.name} are the same host: both lead to {' port '.join(_place(host)[:2])}",
                hint=f"leave one of them out: --limit '!{host.name}'",
            )


def _place(host: Host) -> tuple[str, ...]:
    """What decides where a connection ends; behind another jump host an address is another machine's."""
    if host.local:
        return ("this machine",)
    variables = host.variables
    port = variables.get("ansible_port") or variables.get("ansible_ssh_port") or 22
    ways = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
    return (host.address, str(port), *(str(variables.get(name) or "") for name in ways))


def _command(name: str, key: str, value: Any, problems: list[Problem]) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(value)
    said = "is no list of words; write the command as a list, it is run without a shell"
    problems.append(Problem(said, key=key, source=name))
    return None
