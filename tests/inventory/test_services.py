"""Which service a command on hosts is about that names none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ConfigError
from toolkit.inventory.host import Host, only_profile

PROGRAM = Path(sys.executable).with_name("ddtoolkit")


def test_the_only_profile_of_the_chosen_hosts_is_meant():
    hosts = [Host("a", {}, ("kimi",)), Host("b", {}, ("kimi",)), Host("c")]
    assert only_profile(hosts, limit=None) == "kimi"


def test_several_are_named_with_their_hosts_to_choose_from():
    hosts = [Host(f"h{number}", {}, ("kimi",)) for number in range(7)] + [Host("b", {}, ("other", "kimi"))]
    with pytest.raises(ConfigError) as caught:
        only_profile(hosts, limit="all")
    choices = "(kimi: b, h0, h1, h2, h3 and 3 more; other: b)"
    assert caught.value.message == f"the hosts matched by --limit all carry several profiles {choices}"
    assert caught.value.hint == "name one of them: kimi, other"
    with pytest.raises(ConfigError, match="no host of the inventory lists any profile"):
        only_profile([Host("c")], limit=None)


def test_a_command_without_a_name_tells_what_there_is_to_choose_from(tmp_path):
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text("all: {hosts: {a: {ddtoolkit_profiles: [systemd-cpu, local-cpu]}}}\n")
    done = subprocess.run(
        [PROGRAM, "drift", "-i", inventory], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert re.search(r"carry several profiles \(local-cpu: a; systemd-cpu: a\)", done.stderr)
    assert "next: name one of them: local-cpu, systemd-cpu" in done.stderr
