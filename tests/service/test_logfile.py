"""Rotation, tail and follow."""

import threading
import time

from toolkit.service.logfile import RotatingLog, follow, rotated, tail


def numbers(count):
    return [f"line {number:04d}" for number in range(count)]


def test_rotates_at_the_size_and_keeps_two(tmp_path):
    path = tmp_path / "x.log"
    log = RotatingLog(path, 100)
    for line in numbers(60):
        log.write(line.encode() + b"\n")
    log.close()
    assert all(file.stat().st_size <= 100 for file in rotated(path))
    assert {file.name for file in tmp_path.iterdir()} == {"x.log", "x.log.1", "x.log.2"}
    assert tail(path, 25) == numbers(60)[-25:]
    assert path.stat().st_mode & 0o777 == 0o640


def test_goes_on_where_an_earlier_one_ended(tmp_path):
    path = tmp_path / "x.log"
    for line in numbers(30):
        log = RotatingLog(path, 100)
        log.write(line.encode() + b"\n")
        log.close()
    assert tail(path, 20) == numbers(30)[-20:]
    assert path.stat().st_size <= 100


def test_tail_of_odd_files(tmp_path):
    path = tmp_path / "x.log"
    assert tail(path, 5) == []
    path.write_bytes(b"")
    assert tail(path, 5) == []
    path.write_bytes(b"whole\nbad \xff byte\nno newline at the end")
    assert tail(path, 2) == ["bad \ufffd byte", "no newline at the end"]
    assert tail(path, 0) == []
    path.write_bytes(b"y" * 200000 + b"\nlast\n")
    assert tail(path, 1) == ["last"]


def test_follow_crosses_rotation_without_loss_or_double(tmp_path):
    path = tmp_path / "x.log"
    log = RotatingLog(path, 4000)
    log.write(b"before 1\nbefore 2\n")
    done = threading.Event()

    def write():
        for line in numbers(900):
            log.write(line.encode() + b"\n")
            if line.endswith("00"):
                time.sleep(0.03)
        done.set()

    writer = threading.Thread(target=write)
    lines = follow(path, 1, ended=done.is_set, poll=0.005)
    assert next(lines) == "before 2"
    writer.start()
    assert list(lines) == numbers(900)
    writer.join()
    log.close()


def test_follow_waits_for_a_log_that_comes_later(tmp_path):
    path = tmp_path / "x.log"
    over = threading.Event()

    def write():
        path.write_text("first\n")
        time.sleep(0.2)
        over.set()

    threading.Timer(0.1, write).start()
    assert list(follow(path, 5, ended=over.is_set, poll=0.01)) == ["first"]


def test_log_is_never_written_through_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / "x.log").symlink_to(elsewhere)
    log = RotatingLog(tmp_path / "x.log", 100)
    log.write(b"text\n")
    log.close()
    assert elsewhere.read_bytes() == b""
