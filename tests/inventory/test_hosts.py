"""Hosts of an inventory that are one and the same."""

from typing import Any

import pytest

from toolkit.errors import ConfigError
from toolkit.inventory.host import Host, hosts_with

JUMP = {"ansible_ssh_common_args": "-J gate"}


def host(name: str, **variables: Any) -> Host:
    return Host(name, variables, ("one",))


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        (host("a", ansible_host="10.0.0.1"), host("b", ansible_host="10.0.0.1"), "10.0.0.1 port 22"),
        (host("10.0.0.1"), host("b", ansible_host="10.0.0.1", ansible_port=22), "10.0.0.1 port 22"),
        (host("a", ansible_connection="local"), host("b", ansible_connection="local"), "this machine"),
    ],
)
def test_two_names_of_one_host_are_refused(first: Host, second: Host, place: str) -> None:
    with pytest.raises(ConfigError, match=f"are the same host: both lead to {place}") as caught:
        hosts_with([first, second], "one", limit=None)
    assert caught.value.hint == f"leave one of them out: --limit '!{second.name}'"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (host("a", ansible_host="10.0.0.1"), host("b", ansible_host="10.0.0.1", ansible_port=23)),
        (host("a", ansible_host="10.0.0.1"), host("b", ansible_host="10.0.0.1", **JUMP)),
        (host("a"), host("b", ansible_connection="local")),
        (host("a", ansible_host="10.0.0.1"), Host("b", {"ansible_host": "10.0.0.1"}, ("two",))),
    ],
)
def test_others_are_not(first: Host, second: Host) -> None:
    assert first in hosts_with([first, second], "one", limit=None)
