"""The Ansible module that writes several files at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.provision.modules import answer_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to root")

Wrote, Wanted = Callable[..., dict[str, Any]], list[dict[str, str]]
TEXT = "options nvidia {{ 6 * 7 }} é\n"


@pytest.fixture
def wrote(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What the module answers on this machine."""

    def run(*files: dict[str, str], check: bool = False) -> dict[str, Any]:
        return answer_of(capsys, "gpu_host", "files", {"files": list(files), "_ansible_check_mode": check})

    return run


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    program = {"path": f"{tmp_path}/lib/deep/program", "content": "#!/bin/sh\n", "mode": "0755"}
    return [{"path": f"{tmp_path}/a.conf", "content": TEXT}, program]


def test_files_and_their_folders_are_made_once(wrote: Wrote, tmp_path: Path, wanted: Wanted) -> None:
    before = os.umask(0o077)
    try:
        assert wrote(*wanted)["paths"] == [item["path"] for item in wanted]
    finally:
        os.umask(before)
    assert (tmp_path / "a.conf").read_text(encoding="utf-8") == TEXT
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"a.conf": 0o644, "lib": 0o755, "deep": 0o755, "program": 0o755}
    inode = (tmp_path / "a.conf").stat().st_ino
    again = wrote(*wanted)
    assert (again["changed"], again["paths"], (tmp_path / "a.conf").stat().st_ino) == (False, [], inode)


def test_another_text_mode_or_owner_is_mended(wrote: Wrote, tmp_path: Path, wanted: Wanted) -> None:
    wrote(*wanted)
    (tmp_path / "a.conf").write_text("theirs")
    os.chown(wanted[1]["path"], 1, 1)
    assert wrote(*wanted)["paths"] == [item["path"] for item in wanted]
    (tmp_path / "a.conf").chmod(0o600)
    assert wrote(*wanted)["paths"] == [wanted[0]["path"]]
    status = (tmp_path / "lib" / "deep" / "program").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (0, 0, 0o755)


def test_check_mode_tells_the_difference_and_writes_nothing(
    wrote: Wrote, tmp_path: Path, wanted: Wanted
) -> None:
    (tmp_path / "a.conf").write_text("theirs\n")
    shown = wrote(*wanted, check=True)
    assert shown["paths"] == [item["path"] for item in wanted]
    assert [(item["before"], item["after"]) for item in shown["diff"]] == [
        ("theirs\n", TEXT),
        ("", "#!/bin/sh\n"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.conf"]
    assert (tmp_path / "a.conf").read_text() == "theirs\n"


def test_a_link_is_replaced_and_what_it_led_to_is_left(wrote: Wrote, tmp_path: Path, wanted: Wanted) -> None:
    (tmp_path / "theirs").write_text(TEXT)
    (tmp_path / "a.conf").symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o600)
    assert wrote(wanted[0])["changed"]
    assert not (tmp_path / "a.conf").is_symlink()
    assert (tmp_path / "theirs").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("name", "why"), [("folder", "is a folder"), ("file/a.conf", "Not a directory")])
def test_what_cannot_be_written_is_named(wrote: Wrote, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    shown = wrote({"path": f"{tmp_path}/{name}", "content": TEXT})
    assert shown["failed"]
    assert str(tmp_path) in shown["msg"]
    assert why in shown["msg"]


def test_other_ends_of_lines_are_another_text(wrote: Wrote, tmp_path: Path, wanted: Wanted) -> None:
    (tmp_path / "a.conf").write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert wrote(wanted[0])["changed"]
    assert (tmp_path / "a.conf").read_bytes() == TEXT.encode()
    theirs = wanted[0] | {"content": "a\r\nb\r"}
    assert [wrote(theirs)["changed"] for _ in range(2)] == [True, False]
    (tmp_path / "a.conf").write_bytes(b"\xff")
    assert wrote(wanted[0] | {"content": "\ufffd"})["changed"]


@pytest.mark.parametrize("check", [True, False])
def test_a_folder_that_is_a_link_to_nothing_is_named(wrote: Wrote, tmp_path: Path, check: bool) -> None:
    (tmp_path / "lib").symlink_to(tmp_path / "absent")
    shown = wrote({"path": f"{tmp_path}/lib/deep/a.conf", "content": TEXT}, check=check)
    assert shown["msg"] == f"{tmp_path}/lib is a link to nothing, and a folder is to be there"
