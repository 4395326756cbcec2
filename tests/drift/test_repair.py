"""Owners and modes set right, with what others put in the way."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from toolkit.drift.repair import give_below, give_to_root, set_mode

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
USER = "daemon"


def owner(path: Path) -> str:
    return pwd.getpwuid(path.lstat().st_uid).pw_name


def test_everything_below_is_given_and_nothing_outside(tmp_path: Path) -> None:
    outside, cache = tmp_path / "outside", tmp_path / "cache"
    (cache / "deep").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").touch()
    (cache / "deep" / "file").touch()
    (cache / "link").symlink_to(outside)
    (cache / "dangling").symlink_to(tmp_path / "nothing")
    give_below(cache, USER)
    given = [cache / "deep", cache / "deep" / "file", cache / "link", cache / "dangling"]
    assert {owner(path) for path in given} == {USER}
    assert {owner(path) for path in (outside, outside / "file")} == {"root"}


def test_a_second_name_of_a_file_gives_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "shadow").touch()
    os.link(tmp_path / "shadow", tmp_path / "cache" / "mine")
    give_below(tmp_path / "cache", USER)
    assert owner(tmp_path / "shadow") == "root"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch(mode=0o600)
    os.chown(target, 1, 1)
    link.symlink_to(target)
    with pytest.raises(OSError, match="is a link"):
        set_mode(link, 0o644)
    with pytest.raises(OSError, match="is a link"):
        give_to_root(link)
    assert (target.stat().st_mode & 0o777, target.stat().st_uid) == (0o600, 1)


def test_mode_and_owner_are_set(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o666)
    os.chown(path, 1, 1)
    set_mode(path, 0o644)
    give_to_root(path)
    assert (path.stat().st_mode & 0o777, path.stat().st_uid, path.stat().st_gid) == (0o644, 0, 0)
