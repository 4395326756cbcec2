"""How a host is reached, through the real `ssh -G`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ConfigError
from toolkit.inventory.host import Host
from toolkit.remote.options import SshOptions, ssh_options

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="the OpenSSH client is not installed")


def _options(config: Path, **variables: Any) -> SshOptions:
    variables.setdefault("ansible_ssh_common_args", f"-F {config}")
    return ssh_options(Host("ct200", variables))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    path.write_text(
        "Host ct200\n  HostName 192.0.2.10\n  User fromconfig\n  Port 2200\n  IdentityFile /keys/config\n"
        "  HostKeyAlias alias-of-ct200\n"
        "Host jump\n  HostName 192.0.2.1\n  User hopper\n  Port 2022\n"
        "Host behind\n  ProxyJump jump,second@192.0.2.3:23\n"
        "Host piped\n  ProxyCommand nc %h %p\n"
        "Host token\n  PKCS11Provider /usr/lib/opensc.so\n"
        "Host *\n  UserKnownHostsFile /known/one /known/two\n  GlobalKnownHostsFile none\n",
        encoding="utf-8",
    )
    return path


def test_the_ssh_configuration_holds(config: Path) -> None:
    options = _options(config)
    assert (options.hostname, options.port, options.user) == ("192.0.2.10", 2200, "fromconfig")
    assert options.identity_files[0] == Path("/keys/config")
    assert options.known_hosts == (Path("/known/one"), Path("/known/two"))
    assert options.known_as == "alias-of-ct200"


def test_inventory_variables_come_before_the_configuration(config: Path) -> None:
    options = _options(
        config, ansible_port=2222, ansible_user="deploy", ansible_ssh_private_key_file="/keys/inventory"
    )
    assert (options.port, options.user) == (2222, "deploy")
    assert options.identity_files[0] == Path("/keys/inventory")


def test_a_port_is_part_of_the_name_in_known_hosts(config: Path) -> None:
    options = _options(config, ansible_host="192.0.2.77", ansible_port=2222)
    assert options.known_as == "[192.0.2.77]:2222"
    assert _options(config, ansible_host="192.0.2.77").known_as == "192.0.2.77"


def test_jump_hosts_take_their_own_part_of_the_configuration(config: Path) -> None:
    first, second = _options(config, ansible_host="behind").jumps
    assert (first.hostname, first.port, first.user) == ("192.0.2.1", 2022, "hopper")
    assert (second.hostname, second.port, second.user) == ("192.0.2.3", 23, "second")
    [given] = _options(config, ansible_ssh_common_args=f"-F {config} -o ProxyJump=deploy@192.0.2.9").jumps
    assert (given.hostname, given.user) == ("192.0.2.9", "deploy")


def test_a_proxy_command_is_kept_for_the_session(config: Path) -> None:
    assert _options(config, ansible_host="piped").proxy_command == "nc %h %p"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ansible_connection": "winrm"}, "ct200: ansible_connection: 'winrm' is not supported"),
        ({"ansible_password": "x"}, "ct200: ansible_password: passwords are not used"),
        ({"ansible_become_method": "doas"}, "ct200: ansible_become_method: 'doas'"),
        ({"ansible_become_user": "web"}, "ct200: ansible_become_user: 'web'"),
        ({"ansible_port": "http"}, "ct200: ansible_port: 'http' is no TCP port"),
        ({"ansible_port": 70000}, "ct200: ansible_port: 70000 is no TCP port"),
        ({"ansible_ssh_common_args": "-o 'x"}, "ct200: ansible_ssh_common_args: cannot be split"),
        ({"ansible_ssh_common_args": "-o Nonsense=1"}, "ct200: ansible_ssh_common_args: .*nonsense"),
        ({"ansible_host": "token"}, "ct200: pkcs11provider: keys on PKCS#11 tokens cannot be used"),
        ({"ansible_host": "-oProxyCommand=x"}, "ct200: ansible_host: '-oProxyCommand=x' is no host name"),
    ],
)
def test_what_cannot_be_done_is_named(config: Path, variables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _options(config, **variables)


def test_all_that_cannot_be_done_is_named_at_once(config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _options(config, ansible_password="x", ansible_become_method="su")
    assert len(caught.value.problems) == 2
