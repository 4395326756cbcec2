"""The collector on this machine: programs and file systems that hang, garble or are not there."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.doctor import collect, sandbox
from toolkit.doctor.examine import examine
from toolkit.doctor.programs import ask
from toolkit.doctor.request import examination
from toolkit.profile.loading import load_profile
from toolkit.profile.schema import Profile


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return load_profile("local-cpu", sets=("service.port=1", f"host.root={tmp_path}/root")).profile


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a program into the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    return make


def test_a_file_system_that_does_not_answer_keeps_nobody_waiting(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    usage = shutil.disk_usage

    def hangs(path: Any) -> Any:
        if str(path) != "/dev/shm":
            answered.wait(60)
        return usage(path)

    monkeypatch.setattr(collect, "_QUICK", 0.5)
    monkeypatch.setattr(shutil, "disk_usage", hangs)
    begun = time.monotonic()
    report = examine(examination(profile))
    assert time.monotonic() - begun < 10
    answered.set()
    (disk,) = [item for item in report.findings if item.check == "disk"]
    assert disk.level == "warn"
    assert disk.seen.count("the file system did not answer within 0.5 s") == 3


def test_a_folder_of_nobody_is_told(profile: Profile) -> None:
    asked = examination(profile)
    asked["request"]["paths"] = ["~nobody-of-this-name/models"]
    (disk,) = [item for item in examine(asked).findings if item.check == "disk"]
    assert disk.level == "warn"
    assert "~nobody-of-this-name/models: " in disk.seen


def test_programs_speak_english(on_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "de")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    on_path("tells", 'echo "$LC_ALL,$LANGUAGE"')
    assert ask(["tells"])["out"] == "C.UTF-8,\n"


def test_a_probe_that_answers_with_garbage_is_no_sandbox(on_path: Any) -> None:
    wanted = {"user": "nobody", "properties": [], "environment": {}, "probe": {}}
    for text in ("echo 7", "echo '[]'", "echo nonsense", "exit 3"):
        on_path("systemd-run", text)
        assert sandbox.look(wanted)["seen"] is None
