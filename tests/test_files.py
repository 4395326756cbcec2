"""Files, records, secrets, ports: the small things that everything rests on."""

import os
import socket

import pytest
import yaml

from toolkit.errors import ConfigError
from toolkit.files import (
    Record,
    make_private,
    read_json,
    read_record,
    replace_file,
    temporaries,
    write_new,
)
from toolkit.layout import Layout
from toolkit.release import history
from toolkit.release.journal import JOURNAL_FILE, read_journal
from toolkit.service import ports
from toolkit.service.manager import Leftover
from toolkit.service.processes import ProcessId, boot_id, descendants, identify, read_stat
from toolkit.service.secrets import stored_secrets, write_secrets
from toolkit.service.supervision import STATUS_FILE, Supervision, read_supervision
from toolkit.service.unit import SecretSource, Unit


def test_new_file_is_never_another(tmp_path):
    path = tmp_path / "x"
    write_new(path, b"1", 0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"1", 0o600)
    with pytest.raises(FileExistsError):
        write_new(path, b"2")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "absent")
    with pytest.raises(FileExistsError):
        write_new(link, b"2")
    assert not (tmp_path / "absent").exists()


def test_replaced_file_keeps_the_old_content_on_failure(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "inside").touch()
    with pytest.raises(OSError, match="directory"):
        replace_file(folder, b"new")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["folder", "x"]


def test_private_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True, mode=0o755)
    assert make_private(folder).stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError, match="link"):
        make_private(tmp_path / "link")


def test_record(tmp_path):
    path = tmp_path / "r"
    assert read_record(path) is None
    record = Record(path)
    assert read_record(path) is None
    record.write({"a": "x" * 3000})
    record.write({"a": 1})
    assert read_record(path) == {"a": 1}
    with pytest.raises(ValueError, match="does not fit"):
        record.write({"a": "x" * 17000})
    record.close()
    path.write_bytes(b"[1]".ljust(16384))
    assert read_record(path) is None
    assert read_json(tmp_path / "absent") is None


_ODD = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "deep in a line": lambda path: path.write_bytes(b'{"a":' * 200_000 + b"\n"),
}


@pytest.mark.parametrize("odd", _ODD)
def test_what_lies_in_a_files_place_is_neither_waited_for_nor_read_without_end(tmp_path, odd):
    paths = Layout(tmp_path).service("s")
    paths.state.mkdir(parents=True)
    for path in (tmp_path / "value.json", paths.history, tmp_path / JOURNAL_FILE):
        _ODD[odd](path)
    assert read_json(tmp_path / "value.json") is None
    assert read_record(tmp_path / "value.json") is None
    assert history.read(paths) == []
    assert read_journal(tmp_path) == []


def test_a_file_behind_a_link_is_read(tmp_path):
    (tmp_path / "there").write_text("[1]")
    (tmp_path / "here").symlink_to("there")
    assert read_json(tmp_path / "here") == [1]


def test_supervision_always_fits_its_record(tmp_path):
    many = tuple(Leftover(4194304, "\U0001f600" * 4, 1 << 40) for _ in range(500))
    record = Record(tmp_path / STATUS_FILE)
    full = Supervision("failed", "\U0001f600" * 5000, 1.5, "r", "c" * 32, killed=many, leftovers=many)
    full.write(record)
    record.close()
    found = read_supervision(tmp_path)
    assert (found.state, len(found.killed), found.leftovers[0]) == ("failed", 20, many[0])


def test_process_is_known_by_more_than_its_pid():
    me = identify(os.getpid())
    assert me.alive()
    assert ProcessId.from_json(me.to_json()) == me
    assert not ProcessId(me.pid, me.start + 1, me.boot).alive()
    assert not ProcessId(me.pid, me.start, "other").alive()
    assert ProcessId.from_json({"pid": "1"}) is None
    assert boot_id()


def test_zombie_does_not_count():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert read_stat(child).state == "Z"
    assert not identify(child).alive()
    assert child not in [stat.pid for stat in descendants(os.getpid())]
    os.waitpid(child, 0)
    assert identify(child) is None


def test_name_with_parentheses_is_read():
    child = os.fork()
    if child == 0:
        with open("/proc/self/comm", "w") as file:  # noqa: PTH123
            file.write("a) b (c")
        os.read(os.open("/dev/zero", os.O_RDONLY), 1)
        os.kill(os.getpid(), 19)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        stat = read_stat(child)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert (stat.name, stat.parent) == ("a) b (c", os.getpid())


def test_ports():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use by process {os.getpid()} (" in ports.busy(
            "127.0.0.1", port
        )
        assert ports.busy("0.0.0.0", port)  # noqa: S104
    assert ports.busy("127.0.0.1", port) == ""
    assert "no address of this machine" in ports.busy("no.such.host.invalid", port)
    assert ports.busy("192.0.2.1", port)


def unit(tmp_path, **secrets):
    return Unit(
        name="x",
        release="r",
        description="",
        argv=("p",),
        environment={},
        working_directory="/",
        host="127.0.0.1",
        port=1,
        secrets=secrets,
        secrets_file=str(tmp_path / "secrets" / "r.yaml"),
    )


@pytest.mark.parametrize(
    "value", ["pa$1wor$D", "{a: b}", "'\"\\", "- x", "yes", "123", "# no", "\u00e9\U0001f600", " padded "]
)
def test_secret_arrives_whole_whatever_yaml_makes_of_it(tmp_path, monkeypatch, value):
    """R2, R6."""
    monkeypatch.setenv("S", value)
    made = unit(tmp_path, **{"api-key": SecretSource(env="S")})
    write_secrets(made)
    path = tmp_path / "secrets" / "r.yaml"
    assert yaml.safe_load(path.read_text()) == {"api-key": value}
    assert stored_secrets(made) == {"api-key": value}
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_secret_of_before_is_kept_and_a_new_one_taken(tmp_path, monkeypatch):
    made = unit(tmp_path, **{"api-key": SecretSource(env="S")})
    monkeypatch.delenv("S", raising=False)
    with pytest.raises(ConfigError, match="env S"):
        write_secrets(made)
    monkeypatch.setenv("S", "one")
    write_secrets(made)
    monkeypatch.delenv("S")
    write_secrets(made)
    assert stored_secrets(made) == {"api-key": "one"}
    monkeypatch.setenv("S", "two")
    write_secrets(made)
    assert stored_secrets(made) == {"api-key": "two"}


def test_no_secrets_no_file(tmp_path):
    assert stored_secrets(unit(tmp_path)) == {}


def test_a_temporary_file_that_was_cleared_away_is_written_again(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    written = []

    def write_and_lose(temporary, data, mode, **options):
        write_new(temporary, data, mode, **options)
        written.append(temporary)
        if len(written) == 1:
            assert temporaries(tmp_path, "record.json") == [temporary]
            temporary.unlink()

    monkeypatch.setattr("toolkit.files.write_new", write_and_lose)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert len(written) == 2
    assert temporaries(tmp_path) == []
