"""Next steps of hosts, as they are given from the control machine."""

from pathlib import Path

import pytest
from typer.main import get_command

from toolkit.cli.main import app
from toolkit.errors import ConfigError, LockedError, Problem
from toolkit.inventory.commands import _COMMAND, command, options, pasteable, telling, told
from toolkit.inventory.host import Host

FILES = (Path("site.yaml"), Path("my hosts.yaml"))
HOST = Host("ct200", {}, ("kimi",), inventory=FILES[:1])
ABOUT = "-i site.yaml --limit ct200"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ddtoolkit status kimi", f"ddtoolkit status kimi {ABOUT}"),
        ("ddtoolkit history lists them", f"ddtoolkit history {ABOUT} lists them"),
        ("ddtoolkit rollback kimi ends it now", f"ddtoolkit rollback kimi {ABOUT} ends it now"),
        (
            "ddtoolkit rollback kimi --to RELEASE goes to another of ddtoolkit history kimi",
            f"ddtoolkit rollback kimi {ABOUT} --to RELEASE goes to another of ddtoolkit history kimi {ABOUT}",
        ),
        (
            "wait with --lock-wait, or: ddtoolkit lock release 0a1b --service kimi",
            f"wait with --lock-wait, or: ddtoolkit lock release {ABOUT} 0a1b --service kimi",
        ),
        ("ddtoolkit stop kimi; then prune again", f"ddtoolkit stop kimi {ABOUT}; then prune again"),
        ("(ddtoolkit prune removes it)", f"(ddtoolkit prune {ABOUT} removes it)"),
        (
            "ddtoolkit deploy profile NAME makes it ready",
            f"ddtoolkit deploy profile kimi {ABOUT} makes it ready",
        ),
        ("ddtoolkit status kimi-2 shows it", f"ddtoolkit status {ABOUT} kimi-2 shows it"),
        (
            "ddtoolkit deploy profile kimi --overlay ep8 --set 'a.b=c d'",
            f"ddtoolkit deploy profile kimi {ABOUT} --overlay ep8 --set 'a.b=c d'",
        ),
        (
            "ddtoolkit deploy profile kimi.yaml --overlay ep8",
            f"ddtoolkit deploy profile {ABOUT} kimi.yaml --overlay ep8",
        ),
        ("ddtoolkit deploy profile kimi/k2.yaml", f"ddtoolkit deploy profile {ABOUT} kimi/k2.yaml"),
        (
            "ddtoolkit uninstall NAME --purge -i INVENTORY --limit ct200 takes it back",
            f"ddtoolkit uninstall kimi --purge {ABOUT} takes it back",
        ),
        (
            "ddtoolkit hosts trust ct200 -i INVENTORY --fingerprint SHA256:x",
            "ddtoolkit hosts trust ct200 -i site.yaml --fingerprint SHA256:x",
        ),
        (
            "ddtoolkit wheelhouse with the same --out mends it",
            "ddtoolkit wheelhouse with the same --out mends it",
        ),
        ("free some space", "free some space"),
    ],
)
def test_commands_name_the_inventory_and_the_host(said, shown):
    assert pasteable(said, HOST) == shown
    assert pasteable(shown, HOST) == shown
    assert pasteable(said, Host("this machine", {})) == said


def test_a_name_is_filled_in_only_where_there_is_one():
    two = Host("ct200", {}, ("kimi", "other"), inventory=FILES[:1])
    assert pasteable("ddtoolkit start NAME", two) == f"ddtoolkit start NAME {ABOUT}"


def test_a_command_about_several_hosts_is_quoted_for_a_shell():
    both = [Host("a", inventory=FILES), Host("b", inventory=FILES)]
    assert command(both, "status") == "ddtoolkit status -i site.yaml -i 'my hosts.yaml' --limit a,b"
    assert command([Host("a")], "status kimi") == "ddtoolkit status kimi"
    assert options([]) == ""


def test_only_next_steps_of_an_answer_are_changed():
    answer = {"line": "ddtoolkit status", "outcome": {"hint": "ddtoolkit status", "exit_code": 1}}
    found = told([{**answer, "warnings": ["x (ddtoolkit stop kimi ends it)", 3]}, None], HOST)
    assert found[0]["line"] == "ddtoolkit status"
    assert found[0]["outcome"] == {"hint": f"ddtoolkit status {ABOUT}", "exit_code": 1}
    assert found[0]["warnings"] == [f"x (ddtoolkit stop kimi {ABOUT} ends it)", 3]


def test_errors_that_were_raised_about_a_host_are_changed():
    with pytest.raises(LockedError) as caught, telling(HOST):
        raise LockedError("kimi is locked (ddtoolkit lock show)", hint="ddtoolkit status kimi")
    assert str(caught.value) == caught.value.message == f"kimi is locked (ddtoolkit lock show {ABOUT})"
    assert caught.value.hint == f"ddtoolkit status kimi {ABOUT}"
    with pytest.raises(ConfigError) as refused, telling(HOST):
        raise ConfigError([Problem("is wrong", hint="ddtoolkit history lists them")])
    assert refused.value.problems[0].hint == f"ddtoolkit history {ABOUT} lists them"


def test_all_commands_on_hosts_are_known_and_no_others():
    def leaves(group, *words):
        for name, item in group.commands.items():
            if hasattr(item, "commands"):
                yield from leaves(item, *words, name)
            else:
                yield " ".join([*words, name]), any(option.name == "inventory" for option in item.params)

    known = {
        name: _COMMAND.fullmatch(f"ddtoolkit {name}") is not None for name, _ in leaves(get_command(app))
    }
    assert known == dict(leaves(get_command(app)))
