"""Reaching real hosts: keys, ports, jump hosts, ssh config, sudo, and hosts that vanish."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import MakeHost
from tests.hosts.inventory import host_variables, write_inventory
from tests.hosts.machines import Host
from toolkit.errors import ToolkitError, UnreachableError
from toolkit.inventory import host as inventory
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.provision.playbook import run_on_hosts
from toolkit.provision.requirements import requirements
from toolkit.remote import keys
from toolkit.remote.agent import NotReadyError, agent_on
from toolkit.remote.options import ssh_options
from toolkit.remote.ssh import connect, offered_key

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ready(make_host: MakeHost) -> Host:
    """A host on which the agent can run."""
    return make_host("bookworm", name="ready", engine=True)


def known_to_toolkit(host: Host, **variables: Any) -> inventory.Host:
    return inventory.Host(host.name, {**host_variables(host), **variables})


def call(host: Host, **variables: Any) -> Any:
    with agent_on(known_to_toolkit(host, **variables), python=sys.executable) as agent:
        return agent.call("status", {})


def test_the_agent_answers_and_leaves_only_the_toolkit(ready: Host) -> None:
    assert call(ready) == []
    assert call(ready) == []  # the second time the package is there already
    placed = ready.root(["find", "/opt/ddtoolkit/tool", "-mindepth", "1", "-maxdepth", "1"]).stdout.split()
    assert len(placed) == 1
    writable = ready.root(["find", placed[0], "!", "-user", "root", "-o", "-perm", "/022"]).stdout
    assert writable == ""


def test_an_agent_without_its_libraries_is_named(ready: Host) -> None:
    for python, said in (("/usr/bin/python3", "lacks pydantic"), ("/opt/nothing", "does not run")):
        with (
            pytest.raises(NotReadyError, match=f"{python} {said}"),
            agent_on(known_to_toolkit(ready), python=python),
        ):
            pass


def named(host: Host) -> inventory.Host:
    return replace(known_to_toolkit(host), inventory=(Path("inventory.yaml"),))


def test_a_host_without_a_whole_deploy_says_so_and_what_goes_on_with_it(ready: Host) -> None:
    call(ready)
    about = "-i inventory.yaml --limit ready"
    takes = f"; ddtoolkit uninstall NAME --purge {about} takes it back"
    ready.root(["mkdir", "/opt/ddtoolkit/services"])
    for said, goes in (
        ("a deploy was begun there, and has not finished provisioning", f"goes on with it{takes}"),
        ("nothing of ddtoolkit is there yet", "makes it ready"),
    ):
        with pytest.raises(NotReadyError, match=said) as caught, agent_on(named(ready)):
            pass
        assert "/usr/bin/python3 lacks pydantic" in caught.value.message
        assert caught.value.hint == f"ddtoolkit deploy profile NAME {about} {goes}"
        # Neither the copy that a plan brings nor a checkpoint that `models add` fetches is a deploy.
        ready.root(["rm", "-rf", "/opt/ddtoolkit/services"])
        ready.root(["mkdir", "-p", "/var/lib/ddtoolkit/models/target", "/var/lib/ddtoolkit/state"])


def test_an_unknown_key_is_refused_until_it_is_trusted(ready: Host, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    variables = {"ansible_ssh_common_args": f"-o UserKnownHostsFile={known} -o GlobalKnownHostsFile=none"}
    with pytest.raises(UnreachableError, match="its key is not known") as caught:
        call(ready, **variables)
    options = ssh_options(known_to_toolkit(ready, **variables))
    blob = offered_key(options)
    assert keys.fingerprint(blob) in caught.value.message
    assert not known.exists()
    keys.add(options.known_as, known, blob)
    assert call(ready, **variables) == []
    assert "127.0.0.1" not in known.read_text(encoding="utf-8")


def test_trusting_needs_the_right_fingerprint(ready: Host, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    written = tmp_path / "inventory.yaml"
    arguments = f"-o UserKnownHostsFile={known} -o GlobalKnownHostsFile=none"
    written.write_text(
        f"all: {{hosts: {{ready: {{ansible_host: {ready.address}, ansible_port: {ready.port}, "
        f"ansible_ssh_common_args: {arguments}}}}}}}",
        encoding="utf-8",
    )

    def trust(fingerprint: str) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).parent / "ddtoolkit", "hosts", "trust", "ready", "-i", written]
        return subprocess.run(
            [*command, "--fingerprint", fingerprint], capture_output=True, text=True, check=False, timeout=60
        )

    wrong = trust("SHA256:" + "A" * 43)
    assert wrong.returncode == 4
    assert "not SHA256:AAAA" in wrong.stderr
    assert not known.exists()
    right = keys.fingerprint(offered_key(ssh_options(known_to_toolkit(ready))))
    assert trust(right).returncode == 0
    assert call(ready, ansible_ssh_common_args=arguments) == []
    assert "is known already" in trust(right).stderr


def test_a_changed_key_is_refused(ready: Host, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    public = (tmp_path / "other.pub").read_text(encoding="utf-8")
    known = tmp_path / "known_hosts"
    known.write_text(f"[{ready.address}]:{ready.port} {public}", encoding="utf-8")
    with pytest.raises(UnreachableError, match=f"its key changed.*{known}:1"):
        call(ready, ansible_ssh_common_args=f"-o UserKnownHostsFile={known}")


def test_a_refused_login_says_what_was_tried(ready: Host, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", locked], check=True)
    config = tmp_path / "config"
    config.write_text(f"IdentityFile {locked}\nIdentitiesOnly yes\n", encoding="utf-8")
    common = f"-F {config} -o UserKnownHostsFile={ready.network.known_hosts}"
    with pytest.raises(UnreachableError, match=f"{key}: refused") as caught:
        call(ready, ansible_ssh_private_key_file=str(key), ansible_ssh_common_args=common)
    assert f"{locked}: is encrypted; unlock it with: ssh-add {locked}" in caught.value.message


def test_a_jump_host_and_the_ssh_configuration_lead_there(
    ready: Host, make_host: MakeHost, tmp_path: Path
) -> None:
    behind = make_host("bookworm", name="behind", engine=True)
    known = tmp_path / "known_hosts"
    known.write_text(
        ready.network.known_hosts.read_text(encoding="utf-8") + f"\n{behind.ip} {behind.host_key}\n",
        encoding="utf-8",
    )
    config = tmp_path / "config"
    config.write_text(
        f"Host gate\n  HostName {ready.address}\n  Port {ready.port}\n"
        f"Host {behind.ip}\n  ProxyJump gate\n"
        f"Host *\n  User {ready.user}\n  IdentityFile {ready.key}\n  UserKnownHostsFile {known}\n",
        encoding="utf-8",
    )
    found = inventory.Host("behind", {"ansible_host": behind.ip, "ansible_ssh_common_args": f"-F {config}"})
    with connect(ssh_options(found)) as session:
        channel = session.open(["hostname"])
        assert channel.recv(100) == b"behind\n"
    with agent_on(found, python=sys.executable) as agent:
        assert agent.call("status", {}) == []


def test_a_proxy_command_leads_there(ready: Host) -> None:
    command = f"{sys.executable} -c 'import socket,os,sys,threading as t;s=socket.create_connection"
    command += "((sys.argv[1],int(sys.argv[2])));t.Thread(target=lambda:[os.write(1,d) for d in iter(lambda:"
    command += 's.recv(65536),b"")],daemon=True).start();[s.sendall(d) for d in iter(lambda:os.read(0,65536),'
    command += 'b"")]\' %h %p'
    config = ready.network.known_hosts.with_name("proxied")
    config.write_text(
        f"Host *\n  ProxyCommand {command}\n  UserKnownHostsFile {ready.network.known_hosts}\n",
        encoding="utf-8",
    )
    assert call(ready, ansible_ssh_common_args=f"-F {config}") == []


@pytest.mark.parametrize(
    ("sudoers", "said"),
    [
        ("deploy ALL=(ALL) ALL", "sudo asks for a password"),
        (
            "Defaults:deploy requiretty\ndeploy ALL=(ALL) NOPASSWD: ALL",
            "sudo asks for a password or a terminal",
        ),
    ],
)
def test_sudo_that_asks_is_named(make_host: MakeHost, sudoers: str, said: str, tmp_path: Path) -> None:
    host = make_host("bookworm", engine=True)
    host.root(["sh", "-c", "rm /etc/sudoers.d/*; cat > /etc/sudoers.d/deploy"], input=sudoers + "\n")
    with pytest.raises(UnreachableError, match=said) as caught:
        call(host)
    assert "NOPASSWD" in str(caught.value.hint)
    # Ansible, which runs by itself in the playbooks, does not wait for an answer either (S3).
    inventory_file = write_inventory(tmp_path / "inventory.yaml", [host])
    settings = requirements(load_profile("systemd-cpu").profile, Layout()).settings()
    begin = time.monotonic()
    failed = run_on_hosts("provision.yml", settings, [inventory_file], [host.name])
    assert re.search("sudo: .*tty|password", failed[host.name].message)
    assert time.monotonic() - begin < 40


def test_no_ssh_there_is_named_within_seconds(ready: Host) -> None:
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match=r"no SSH at 127\.0\.0\.1 port 9"):
        call(ready, ansible_port=9)
    assert time.monotonic() - begin < 20


def test_a_host_that_vanishes_is_given_up(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host("bookworm", engine=True)
    monkeypatch.setattr("toolkit.remote.agent.SILENCE", 8.0)
    with agent_on(known_to_toolkit(host), python=sys.executable) as agent:
        assert agent.call("status", {}) == []
        host.cut()
        begin = time.monotonic()
        try:
            with pytest.raises(UnreachableError, match="silent for 8 s"):
                agent.call("status", {})
        finally:
            host.restore()
        assert time.monotonic() - begin < 15


def test_an_operation_that_fails_is_no_connection_error(ready: Host) -> None:
    with agent_on(known_to_toolkit(ready), python=sys.executable) as agent:
        with pytest.raises(ToolkitError, match=r"ready: .*no service") as caught:
            agent.call("history", {"service": "absent", "count": 1})
        assert not isinstance(caught.value, UnreachableError)
        assert agent.call("status", {}) == []


def test_the_agents_environment_is_clean(ready: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.broken")
    assert os.environ["LC_ALL"] == "xx_XX.broken"
    assert call(ready) == []


def test_a_silent_host_is_unreachable(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.remote.ssh.CONNECT_LIMIT", 3.0)
    host = make_host("bookworm")
    host.cut()
    try:
        for _ in range(3):
            with pytest.raises(UnreachableError, match="no SSH at"):
                call(host)
    finally:
        host.restore()


def test_a_damaged_copy_of_the_toolkit_is_replaced(ready: Host) -> None:
    assert call(ready) == []
    ready.root(["sh", "-c", "rm /opt/ddtoolkit/tool/*/toolkit/hostside/operations.py"])
    assert call(ready) == []
    ready.root(["sh", "-c", "echo 'x = 1' >> $(ls /opt/ddtoolkit/tool/*/toolkit/layout.py)"])
    assert call(ready) == []
    assert ready.root(["sh", "-c", "tail -n 1 /opt/ddtoolkit/tool/*/toolkit/layout.py"]).stdout != "x = 1\n"
