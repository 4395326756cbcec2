"""What provisioning reads of a host, with programs that answer as a host's do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.provision.modules import answer_of

Look = Callable[..., dict[str, Any]]
CLIENTS = ["chrony.service", "systemd-timesyncd.service"]


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a program before all others."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)

    def make(name: str, text: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    return make


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Look:
    def run(**arguments: Any) -> dict[str, Any]:
        return answer_of(capsys, "base", "base_host", {"folder": str(tmp_path), **arguments})

    return run


def shown(*states: tuple[str, str]) -> str:
    """A systemctl that shows the clients with their load and active states."""
    blocks = [
        f"Id={unit}\nLoadState={load}\nActiveState={active}"
        for unit, (load, active) in zip(CLIENTS, states, strict=True)
    ]
    return "cat <<'END'\n" + "\n\n".join(blocks) + "\nEND"


@pytest.mark.parametrize(
    ("states", "container", "expected"),
    [
        ([("loaded", "inactive"), ("loaded", "active")], False, (False, CLIENTS, [])),
        ([("loaded", "inactive"), ("masked", "inactive")], False, (True, CLIENTS[:1], CLIENTS[1:])),
        ([("not-found", "inactive"), ("masked", "inactive")], False, (True, [], CLIENTS[1:])),
        ([("not-found", "inactive"), ("not-found", "inactive")], False, (True, [], [])),
        ([("loaded", "inactive"), ("loaded", "inactive")], True, (False, CLIENTS, [])),
    ],
)
def test_an_ntp_client_is_due_where_none_runs(
    look: Look,
    on_path: Callable[[str, str], None],
    states: list[tuple[str, str]],
    container: bool,
    expected: tuple[bool, list[str], list[str]],
) -> None:
    on_path("systemctl", shown(*states))
    on_path("systemd-detect-virt", f"exit {0 if container else 1}")
    seen = look(ntp_clients=CLIENTS)
    assert (seen["ntp_due"], seen["ntp_there"], seen["ntp_masked"]) == expected


def test_none_is_due_without_systemd_or_where_nobody_asks(
    look: Look, on_path: Callable[[str, str], None]
) -> None:
    on_path("systemd-detect-virt", "exit 1")
    on_path("systemctl", f"{shown(('loaded', 'inactive'), ('loaded', 'inactive'))}\nexit 1")
    assert not look(ntp_clients=CLIENTS)["ntp_due"]
    on_path("systemctl", shown(("loaded", "inactive"), ("loaded", "inactive")))
    assert not look()["ntp_due"]
    on_path("systemctl", "echo \"Running in chroot, ignoring command 'show'\" >&2")
    assert not look(ntp_clients=CLIENTS)["ntp_due"]


def test_packages_are_read_with_versions_and_holds(look: Look, on_path: Callable[[str, str], None]) -> None:
    lines = ["installed install a 1.0-1", "installed hold b 1:2-1", "config-files deinstall c 3"]
    on_path("dpkg-query", "\n".join([*(f"echo '{line}'" for line in lines), "exit 1"]))
    seen = look(packages=["a", "b", "c", "d"])
    assert seen["installed"] == ["a", "a=1.0-1", "b", "b=1:2-1"]
    assert seen["held"] == ["b"]
    on_path("dpkg-query", "echo 'parsing file near line 7' >&2; exit 2")
    assert look(packages=["a"])["msg"] == "dpkg-query ended with 2: parsing file near line 7"
    assert look()["installed"] == []


def test_without_dpkg_it_is_told_which_systems_are_meant(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/absent")
    said = "dpkg-query ended with 127: packages are looked for on Debian and Ubuntu only"
    assert look(packages=["a"])["msg"] == said


def test_free_space_is_that_of_the_nearest_folder(look: Look, tmp_path: Path) -> None:
    free = shutil.disk_usage("/dev/shm").free
    for folder in ("/dev/shm", "/dev/shm/absent/deep"):
        assert look(folder=folder)["free"] == pytest.approx(free, rel=0.2)
    assert look()["uid"] == os.geteuid()
