import json
import logging
import os
import stat

import pytest

from toolkit.ddtree.server.debug_log import DebugLog
from toolkit.ddtree.types import RoundStats

_STATS = RoundStats(
    nodes=16, depth=6, accepted=2, committed=3, chain_in_tree=True, ranks=(0, 1), reject_rank=-1
)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_one_json_object_with_the_statistics_alone(tmp_path):
    path = tmp_path / "debug.jsonl"
    log = DebugLog(path, 4096)
    log.write(_STATS)
    log.close()
    assert _lines(path) == [
        {
            "nodes": 16,
            "depth": 6,
            "accepted": 2,
            "committed": 3,
            "chain_in_tree": True,
            "ranks": [0, 1],
            "reject_rank": -1,
        }
    ]


def test_the_mode_is_0640_whatever_the_umask_or_the_file_before(tmp_path):
    path = tmp_path / "debug.jsonl"
    path.touch(mode=0o666)
    path.chmod(0o666)
    before = os.umask(0o077)
    try:
        DebugLog(path, 4096).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_rotation_caps_the_size_and_the_number_of_files(tmp_path):
    path = tmp_path / "debug.jsonl"
    log = DebugLog(path, 500)
    for _ in range(40):
        log.write(_STATS)
    log.close()
    names = sorted(item.name for item in tmp_path.iterdir())
    assert names == ["debug.jsonl", "debug.jsonl.1", "debug.jsonl.2", "debug.jsonl.3"]
    assert all(item.stat().st_size <= 500 for item in tmp_path.iterdir())
    assert all(_lines(item) for item in tmp_path.iterdir())


def test_it_appends_to_the_file_of_an_earlier_run(tmp_path):
    path = tmp_path / "debug.jsonl"
    for _ in range(2):
        log = DebugLog(path, 4096)
        log.write(_STATS)
        log.close()
    assert len(_lines(path)) == 2


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.touch()
    link = tmp_path / "debug.jsonl"
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        DebugLog(link, 4096)


def test_a_full_disk_loses_lines_and_says_so_once(caplog):
    from pathlib import Path

    log = DebugLog(Path("/dev/full"), 4096)
    mode = Path("/dev/full").stat().st_mode
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.write(_STATS)
    log.close()
    assert log.lost == 5
    assert [record.getMessage() for record in caplog.records] == [
        "debug file /dev/full: No space left on device; lines are being lost"
    ]
    assert Path("/dev/full").stat().st_mode == mode


def test_it_goes_on_once_there_is_space_and_no_line_is_torn(tmp_path, monkeypatch):
    path = tmp_path / "debug.jsonl"
    log = DebugLog(path, 4096)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))  # a disk with 10 bytes left
    log.write(_STATS)
    monkeypatch.setattr(os, "write", real)
    monkeypatch.setattr("toolkit.ddtree.server.debug_log._RETRY_SECONDS", 0)
    log._retry_at = 0.0
    log.write(_STATS)
    log.close()
    torn, whole = path.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["accepted"] == 2
    assert log.lost == 1
