"""History and journal: what a crash or damage in the middle of a line leaves readable."""

import contextlib
import errno
import json
import os
import subprocess

import pytest

from toolkit.errors import ToolkitError
from toolkit.files import json_bytes
from toolkit.profile.changes import Change
from toolkit.release import history
from toolkit.release.journal import JOURNAL_FILE, Event, Journal, create_journal, read_journal
from toolkit.release.request import Acceptance, Outcome, Request, read_request


def entry(number, **more):
    return history.Entry(id=f"t{number}", kind="deploy", outcome="committed", who="a@b", **more)


def test_history_keeps_order_and_values(service):
    first = entry(1, changes=(Change("a.b", 1, None), Change("c", None, [1])), seconds={"total": 1.5})
    history.append(service.paths, first)
    history.append(service.paths, entry(2))
    assert history.read(service.paths)[0] == first
    assert [item.id for item in history.read(service.paths)] == ["t1", "t2"]

    assert service.paths.history.stat().st_mode & 0o777 == 0o600


def test_history_of_another_version_is_read(service):
    """One that knew no reasons yet, and one that knows more than this."""
    older = {key: value for key, value in entry(1).to_json().items() if key != "reason"}
    newer = entry(2, reason="too slow").to_json() | {"weather": "fair"}
    service.paths.history.write_text("".join(json.dumps(item) + "\n" for item in (older, newer)))
    found = history.read(service.paths)
    assert [(item.id, item.reason) for item in found] == [("t1", ""), ("t2", "too slow")]


def test_torn_history_line_costs_only_itself(service):
    history.append(service.paths, entry(1))
    with service.paths.history.open("ab") as file:
        file.write(b'{"id": "torn", "kind": "dep')
    assert [item.id for item in history.read(service.paths)] == ["t1"]
    history.append(service.paths, entry(2))
    assert [item.id for item in history.read(service.paths)] == ["t1", "t2"]


def test_history_is_never_written_through_a_link(service, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    service.paths.history.symlink_to(elsewhere)
    with pytest.raises(ToolkitError, match="cannot record the change"):
        history.append(service.paths, entry(1))
    assert elsewhere.read_bytes() == b""


def test_journal_goes_on_after_a_torn_line(tmp_path):
    create_journal(tmp_path)
    journal = Journal(tmp_path)
    journal.write(Event("one", "begin", "first", data={"a": "\n\0é"}))
    journal.close()
    path = tmp_path / JOURNAL_FILE
    whole = path.read_bytes().index(b"\0")
    with path.open("r+b") as file:
        file.seek(whole)
        file.write(b'{"step": "torn", "state": "be' + b"x" * 300)
    assert [event.step for event in read_journal(tmp_path)] == ["one"]
    journal = Journal(tmp_path)
    journal.write(Event("two", "done"))
    assert [event.step for event in read_journal(tmp_path)] == ["one", "two"]
    journal.write(Event("three", "done"))
    journal.close()
    events = read_journal(tmp_path)
    assert [event.step for event in events] == ["one", "two", "three"]
    assert events[0].data == {"a": "\n\0é"}


def test_journal_grows_beyond_its_reserved_space(tmp_path):
    create_journal(tmp_path)
    journal = Journal(tmp_path)
    for number in range(40):
        journal.write(Event("acceptance", "progress", "x" * 10000, data={"n": number}), durable=False)
    journal.close()
    assert [event.data["n"] for event in read_journal(tmp_path)] == list(range(40))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small file system")
def test_progress_leaves_space_for_the_outcome(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=False).returncode:
        pytest.skip(reason="no file system can be mounted here")
    try:
        create_journal(disk)
        journal = Journal(disk)
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        written = 0
        with contextlib.suppress(OSError):
            while written < 1000:
                journal.write(Event("acceptance", "progress", "x" * 1000), durable=False)
                written += 1
        assert 100 < written < 300
        # What does not fit leaves the place to what does.
        with pytest.raises(OSError, match="No space left"):
            journal.write(Event("ready", "failed", "x" * 100_000))
        journal.write(Event("outcome", "done", "x" * 10_000))
        journal.close()
        events = read_journal(disk)
        assert [event.step for event in events] == ["acceptance"] * written + ["outcome"]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_absent_journal_is_empty(tmp_path):
    assert read_journal(tmp_path) == []


def test_request_and_outcome_come_back_equal(tmp_path):
    asked = Request(
        kind="swap",
        who="a@b",
        release="r",
        base="b",
        changes=(Change("k", 1, 2),),
        acceptance=Acceptance(("p", "-m", "x"), {"url": "u"}, 3.0),
        experiment_seconds=60.0,
    )
    (tmp_path / "request.json").write_bytes(json_bytes(asked.to_json()))
    assert read_request(tmp_path) == asked
    outcome = Outcome("rolled_back", "m", "swap", seconds={"total": 1.0}, log=("a",))
    assert Outcome.from_json(outcome.to_json()) == outcome
    assert outcome.to_json()["exit_code"] == 5


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "deploy"}', '{"kind": "x", "who": "a", "changes": []}']
)
def test_damaged_request_is_named(tmp_path, text):
    (tmp_path / "request.json").write_text(text)
    with pytest.raises(ToolkitError, match=r"request\.json"):
        read_request(tmp_path)


def served(service, *entries):
    for number, (kind, release, outcome) in enumerate(entries):
        history.append(
            service.paths,
            history.Entry(id=f"t{number}", kind=kind, outcome=outcome, who="a@b", release=release),
        )
    return history.served(service.paths)


def test_what_was_rolled_back_from_is_not_what_served_before(service):
    assert served(
        service,
        ("deploy", "a", "committed"),
        ("swap", "b", "committed"),
        ("rollback", "a", "committed"),
        ("swap", "c", "committed"),
    ) == ["a", "c"]


def test_experiments_and_what_was_undone_never_served_for_good(service):
    assert served(
        service,
        ("deploy", "a", "committed"),
        ("swap", "b", "rolled_back"),
        ("experiment", "c", "committed"),
        ("return", "a", "committed"),
        ("restart", "a", "committed"),
        ("swap", "d", "committed"),
        ("rollback", "a", "rolled_back"),
    ) == ["a", "d"]


def test_an_entry_that_finds_the_disk_full_at_its_very_end_is_made_once(service, monkeypatch):
    history.append(service.paths, entry(1))
    service.host.reserve.fill()
    full, real = [OSError(errno.ENOSPC, "No space left on device")], os.fsync

    def fsync(fd):
        if full:
            raise full.pop()
        real(fd)

    monkeypatch.setattr("os.fsync", fsync)
    history.append(service.paths, entry(2))
    assert not full
    assert [item.id for item in history.read(service.paths)] == ["t1", "t2"]
