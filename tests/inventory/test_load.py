"""Inventories through the real ansible-inventory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ConfigError, ToolkitError
from toolkit.inventory.host import hosts_with
from toolkit.inventory.load import load_hosts
from toolkit.resources import bundled

PLAIN = """
all:
  children:
    gpu:
      hosts:
        b: {ansible_host: 192.0.2.2, ansible_port: 2222, ddtoolkit_profiles: [one, two]}
        a: {ddtoolkit_profiles: [one], ddtoolkit_drain: [lb, drain, a]}
      vars: {ansible_user: deploy}
    other:
      hosts: {c: {}}
"""


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.yaml"
    path.write_text(PLAIN, encoding="utf-8")
    return path


def test_groups_and_variables_come_as_ansible_resolves_them(plain: Path) -> None:
    hosts = {host.name: host for host in load_hosts([plain])}
    assert list(hosts) == ["a", "b", "c"]
    assert hosts["b"].address == "192.0.2.2"
    assert hosts["b"].variables["ansible_user"] == "deploy"
    assert hosts["b"].profiles == ("one", "two")
    assert hosts["a"].drain == ("lb", "drain", "a")
    assert hosts["a"].address == "a"
    assert "ansible_user" not in hosts["c"].variables


def test_a_limit_is_ansibles_pattern(plain: Path) -> None:
    assert [host.name for host in load_hosts([plain], limit="gpu:!a")] == ["b"]


def test_a_limit_that_matches_nothing_is_named(plain: Path) -> None:
    with pytest.raises(ConfigError, match="--limit nope: 'nope' matches no host and no group") as caught:
        load_hosts([plain], limit="nope")
    assert caught.value.hint == "hosts and groups there: a, all, b, c, gpu, other"


def test_a_part_of_a_limit_that_names_nothing_is_refused(plain: Path) -> None:
    """Ansible would go on without it, and so on hosts that were to be left out."""
    with pytest.raises(ConfigError, match="'othr' matches no host and no group") as caught:
        load_hosts([plain], limit="gpu:!othr")
    assert caught.value.hint == "did you mean other?"


def test_only_hosts_that_list_the_profile_carry_it(plain: Path) -> None:
    hosts = load_hosts([plain])
    assert [host.name for host in hosts_with(hosts, "one", limit=None)] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"lists profile 'three' .* b: one, two; c: none"):
        hosts_with(hosts, "three", limit=None)


def test_templates_vault_and_group_vars_are_resolved_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = tmp_path / "vault-password"
    password.write_text("of the vault\n", encoding="utf-8")
    sealed = subprocess.run(
        [
            Path(sys.executable).parent / "ansible-vault", "encrypt_string",
            "--vault-password-file", password,
            "--name", "ansible_ssh_extra_args", "-o SendEnv=hunter2",
        ],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(sealed, encoding="utf-8")
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text("all: {hosts: {a: {n: 7, ansible_host: '192.0.2.{{ n }}'}}}", encoding="utf-8")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(password))
    [host] = load_hosts([inventory])
    assert host.address == "192.0.2.7"
    assert host.variables["ansible_ssh_extra_args"] == "-o SendEnv=hunter2"
    assert "hunter2" not in repr(host)


def test_a_dynamic_source_is_run(tmp_path: Path) -> None:
    script = tmp_path / "dynamic"
    script.write_text(
        f'#!{sys.executable}\nprint(\'{{"g": {{"hosts": ["d"]}}, "_meta": {{"hostvars": '
        '{"d": {"ddtoolkit_profiles": "one"}}}}\')\n',
        encoding="utf-8",
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    [host] = load_hosts([script])
    assert (host.name, host.profiles) == ("d", ("one",))


@pytest.mark.parametrize(
    ("name", "text", "place", "said", "hint"),
    [
        ("i.yaml", "all:\n  hosts:\n   a: {}\n    b: {}\n", "i.yaml:4:", "not YAML (Ansible: ", "bracket"),
        ("i.yml", "all:\n  hosts:\n\ta:\n", "i.yml:3:1: ", "indented with a tab", "write spaces there"),
        ("i.yaml", "- hosts: all\n", "i.yaml: ", "its top level must be groups", "inventory.example.yaml"),
        ("i.yaml", "all:\n  host:\n    a: {}\n", "i.yaml", "skipping unexpected key (host)", "example"),
        ("i.ini", "[g:children]\nnope\n[g]\na\n", "i.ini:2: ", "names the group 'nope'", "a section [nope]"),
        ("i.ini", "[g]\na\n[g:vars\nx=1\n", "i.ini:3: ", "header '[g:vars' is not closed", "close it with ]"),
        ("dynamic", "#!/bin/sh\necho no cloud >&2; exit 3\n", "dynamic: ", "said: no cloud", " --list"),
        (
            "i.yaml", "all:\n  hosts:\n    a:\n      ansible_host: '{{ absent }}'\n", "i.yaml:4: ",
            "a: ansible_host: '{{ absent }}' gives no value (Ansible: 'absent' is undefined)", "group_vars",
        ),
        (
            "i.yaml", "all:\n  hosts:\n    a: {ddtoolkit_profiles: '{{ absent }}'}\n", "i.yaml:3: ",
            "a: ddtoolkit_profiles: '{{ absent }}' gives no value", "define it",
        ),
    ],
)  # fmt: skip
def test_a_broken_inventory_is_told_with_its_place_and_the_next_step(
    tmp_path: Path, name: str, text: str, place: str, said: str, hint: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700 if text.startswith("#!") else 0o600)
    with pytest.raises(ConfigError) as caught:
        load_hosts([path])
    assert str(tmp_path / place) in caught.value.message
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


def test_a_value_in_group_vars_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("x: 1\nansible_user: '{{ who }}'\n", encoding="utf-8")
    path = tmp_path / "inventory.yaml"
    path.write_text("all: {hosts: {a: {}}}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"group_vars/all\.yml:2: a: ansible_user: '\{\{ who \}\}' gives"):
        load_hosts([path])


def test_what_a_template_leaves_out_on_purpose_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    text = "all: {hosts: {a: {ansible_port: '{{ p | default(omit) }}', ansible_host: '{{ n }}.test', n: b}}}"
    path.write_text(text, encoding="utf-8")
    [host] = load_hosts([path])
    assert (host.address, "ansible_port" in host.variables) == ("b.test", False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all: {hosts: {a: {ddtoolkit_profiles: 7}}}", "a: ddtoolkit_profiles: is 7; write a list"),
        ("all: {hosts: {a: {ddtoolkit_drain: lb drain}}}", "a: ddtoolkit_drain: is no list of words"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_hosts([path])


def test_a_pipe_is_no_inventory_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml: is no file and no folder"):
        load_hosts([tmp_path / "pipe.yaml"])


def test_a_script_that_hangs_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    script.chmod(0o755)
    monkeypatch.setattr("toolkit.inventory.load._LIMIT", 3.0)
    with pytest.raises(
        ToolkitError, match=r"hosts\.sh: ansible-inventory has no answer after 3 s"
    ) as refused:
        load_hosts([script])
    assert "run it by hand" in (refused.value.hint or "")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: there is no such inventory"):
        load_hosts([tmp_path / "absent.yaml"])


def test_the_example_is_a_valid_inventory() -> None:
    example = bundled("profiles").parent / "inventory.example.yaml"
    hosts = {host.name: host.profiles for host in load_hosts([example])}
    assert hosts["ct200"] == ("rtx-pro-6000-pcie-8x",)


def test_a_broken_locale_does_not_matter(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.broken")
    assert os.environ["LC_ALL"] == "xx_XX.broken"
    assert len(load_hosts([plain])) == 3
