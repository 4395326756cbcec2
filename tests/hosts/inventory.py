"""The hosts as an Ansible inventory."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.hosts.machines import Host


def host_variables(host: Host) -> dict[str, Any]:
    """What Ansible needs to reach a host."""
    return {
        "ansible_host": host.address,
        "ansible_port": host.port,
        "ansible_user": host.user,
        "ansible_ssh_private_key_file": str(host.key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={host.network.known_hosts}",
    }


def write_inventory(
    path: Path, hosts: Iterable[Host], variables: Mapping[str, Mapping[str, Any]] | None = None
) -> Path:
    """Write an inventory with the hosts, to which `variables` adds some by host name; returns `path`."""
    more = variables or {}
    entries = {host.name: {**host_variables(host), **more.get(host.name, {})} for host in hosts}
    path.write_text(yaml.safe_dump({"all": {"hosts": entries}}, sort_keys=False), encoding="utf-8")
    return path
