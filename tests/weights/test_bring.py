"""Bringing a checkpoint from a real server that breaks, lies and falls silent."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time

import pytest

from tests.weights.checkpoints import contents, sums, touch_again
from tests.weights.server import publishing
from toolkit.errors import ToolkitError
from toolkit.profile.source import parse
from toolkit.weights.bring import Terms, bring
from toolkit.weights.origins import Origin
from toolkit.weights.store import MARKER, damage, read_marker
from toolkit.weights.work import plan

NAME = "folder@v1"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


def test_it_arrives_whole_and_is_marked(fetch, published, models):
    done = fetch()
    folder = models / NAME
    assert (done["changed"], done["folder"]) == (True, str(folder))
    assert contents(folder) == contents(published)
    assert damage(folder) == []
    marker = read_marker(folder)
    assert marker.size == done["bytes"] == done["fetched"] == sum(map(len, contents(published).values()))
    assert marker.files[FIRST].inode == (folder / FIRST).stat().st_ino
    assert sorted(path.name for path in models.iterdir()) == [f".{NAME}.lock", NAME]
    assert (folder / FIRST).stat().st_mode & 0o777 == 0o644


def test_whoever_serves_can_read_it_whatever_the_umask(fetch, published, models):
    (published / "sub").mkdir()
    (published / "sub" / "extra.json").write_text("{}")
    sums(published)
    before = os.umask(0o077)
    try:
        fetch()
    finally:
        os.umask(before)
    paths = [models / NAME, *(models / NAME).rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o644}


def test_what_is_there_is_not_asked_for_again(fetch, server):
    fetch()
    server.asked.clear()
    assert fetch() == {**fetch(), "changed": False, "fetched": 0}
    assert server.asked == []


def test_a_transfer_that_breaks_ten_times_completes_without_a_byte_twice(
    fetch, server, published, models, said
):
    server.faults.cuts.update({FIRST: 7, SECOND: 3})
    server.faults.cut_after = 20_000
    fetch()
    assert contents(models / NAME) == contents(published)
    assert server.faults.cuts.total() == 0
    assert server.sent == sum(map(len, contents(published).values()))
    resumed = [range_ for _, path, range_ in server.asked if range_ and path.endswith(FIRST)]
    assert resumed == [f"bytes={20_000 * count}-" for count in range(1, 8)]
    assert sum("going on" in line for line in said) == 10


def test_a_run_that_was_ended_is_gone_on_with(fetch, server, published, models):
    server.faults.cuts.update({FIRST: 3})
    server.faults.cut_after = 0
    with pytest.raises(ToolkitError, match=r"attempts brought nothing more") as caught:
        fetch(parallel=1)
    assert "goes on" in caught.value.hint
    assert not (models / NAME).exists()
    part = models / f"{NAME}.part"
    (part / FIRST).write_bytes((published / FIRST).read_bytes()[:1234])
    server.sent = 0
    fetch(parallel=1)
    assert contents(models / NAME) == contents(published)
    assert ("GET", f"/folder/{FIRST}", "bytes=1234-") in server.asked


def test_files_that_were_complete_are_neither_fetched_nor_read_again(fetch, server, models):
    server.faults.cuts.update({FIRST: 3})  # the smallest shard, fetched after the other two
    server.faults.cut_after = 0
    with pytest.raises(ToolkitError):
        fetch(parallel=1)
    part = models / f"{NAME}.part"
    assert SECOND in (part / ".arrived").read_text()
    server.asked.clear()
    fetch(parallel=1)
    assert not [item for item in server.asked if item[0] == "GET" and item[1].endswith(SECOND)]


def test_a_note_that_a_full_disk_cut_does_not_take_the_next_one_with_it(fetch, server, models):
    server.faults.cuts.update({FIRST: 6})
    server.faults.cut_after = 0
    notes = models / f"{NAME}.part" / ".arrived"
    with pytest.raises(ToolkitError):
        fetch(parallel=1)
    notes.write_text('{"path": "model-00002-of-00003.safet')
    with pytest.raises(ToolkitError):
        fetch(parallel=1)
    noted = [line for line in notes.read_text().splitlines() if line.endswith("}")]
    assert SECOND in {json.loads(line)["path"] for line in noted}


def test_a_changed_source_is_not_joined_to_what_came_before(fetch, server, published, models):
    server.faults.cuts.update({FIRST: 3})
    server.faults.cut_after = 0
    with pytest.raises(ToolkitError):
        fetch()
    (models / f"{NAME}.part" / FIRST).write_bytes(b"x" * 500)
    data = bytearray((published / FIRST).read_bytes())
    data[-1] ^= 1
    (published / FIRST).write_bytes(data)
    sums(published)
    fetch()
    assert contents(models / NAME) == contents(published)
    assert ("GET", f"/folder/{FIRST}", "bytes=500-") not in server.asked


def test_a_corrupt_shard_is_fetched_once_more(fetch, server, published, models, said):
    server.faults.flip, server.faults.flips = {FIRST: 5000}, 1
    fetch()
    assert contents(models / NAME) == contents(published)
    assert any(f"{FIRST}: its SHA-256 is" in line for line in said)


def test_a_shard_that_stays_corrupt_is_refused_and_the_rest_kept(fetch, server, models):
    server.faults.flip, server.faults.flips = {FIRST: 5000}, 99
    with pytest.raises(ToolkitError, match=rf"{FIRST}: its SHA-256 is \w+, not \w+ as listed; it came twice"):
        fetch(parallel=1)
    part = models / f"{NAME}.part"
    assert not (models / NAME).exists()
    assert (part / FIRST).stat().st_size == 0
    assert SECOND in (part / ".arrived").read_text()
    server.faults.flips = 0
    fetch()


def test_bytes_of_an_earlier_run_that_are_wrong_are_replaced(fetch, server, published, models):
    server.faults.cuts.update({FIRST: 3})
    server.faults.cut_after = 0
    with pytest.raises(ToolkitError):
        fetch()
    whole = (published / FIRST).read_bytes()
    (models / f"{NAME}.part" / FIRST).write_bytes(bytes(len(whole)))
    fetch()
    assert (models / NAME / FIRST).read_bytes() == whole


def test_a_server_without_ranges_sends_it_from_the_beginning(fetch, server, published, models, said):
    server.faults.cuts.update({FIRST: 1})
    server.faults.without_ranges = True
    fetch()
    assert contents(models / NAME) == contents(published)
    assert any("from its beginning" in line for line in said)


def test_a_range_that_begins_elsewhere_is_never_written(fetch, server, models):
    server.faults.cuts.update({FIRST: 1})
    server.faults.wrong_start = True
    with pytest.raises(ToolkitError, match="byte 1001 came instead of byte 1000"):
        fetch()
    assert (models / f"{NAME}.part" / FIRST).stat().st_size == 1000


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_is_busy_is_asked_again(fetch, server, status, published, models):
    server.faults.statuses[FIRST] = [status, status]
    fetch()
    assert contents(models / NAME) == contents(published)


@pytest.mark.parametrize("status", [403, 410])
def test_a_refusal_is_told_at_once(fetch, server, status):
    server.faults.statuses[FIRST] = [status] * 9
    with pytest.raises(ToolkitError, match=rf"{FIRST}: HTTP {status}"):
        fetch()
    assert len(server.faults.statuses[FIRST]) == 8


def test_a_source_that_is_not_there_is_named(fetch, server):
    with pytest.raises(ToolkitError, match=r"http://127.0.0.1:1/x/SHA256SUMS: Connection refused"):
        fetch("http://127.0.0.1:1/x/")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../evil.safetensors", "is no plain path"),
        ("a/../../evil.json", "is no plain path"),
        ("/etc/evil.json", "is no plain path"),
        ("a\\b.json", "is no plain path"),
        ("sub/.weights.json", "is hidden"),
        ("pytorch_model.bin", "is a pickle"),
        ("model.PT", "is a pickle"),
        ("last.ckpt", "is a pickle"),
    ],
)
def test_what_may_not_be_written_is_refused_before_anything_is(fetch, published, models, name, why):
    with (published / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(ToolkitError, match=re.escape(name.replace("\\", "\\\\")) + ".*" + why):
        fetch()
    assert [path.name for path in models.iterdir()] == [f".{NAME}.lock"]


def test_a_checkpoint_without_safetensors_is_refused(fetch, published):
    (published / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n")
    with pytest.raises(ToolkitError, match=r"has no \.safetensors file"):
        fetch()


def test_a_line_that_is_none_is_named(fetch, published):
    with (published / "SHA256SUMS").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ToolkitError, match=r"SHA256SUMS:7: is no `HASH  NAME` line"):
        fetch()


def test_a_shard_whose_header_tells_of_more_is_refused(fetch, published, models):
    (published / FIRST).write_bytes((published / FIRST).read_bytes()[:-1])
    sums(published)
    with pytest.raises(
        ToolkitError, match=r"its safetensors header tells of \d+: the source's copy is damaged"
    ):
        fetch()
    assert not (models / NAME).exists()


def test_a_revision_can_pin_the_sums(fetch, published, models):

    pin = hashlib.sha256((published / "SHA256SUMS").read_bytes()).hexdigest()
    fetch(revision=f"sha256-{pin}")
    (published / "SHA256SUMS").write_text((published / "SHA256SUMS").read_text() + "\n")
    shutil.rmtree(models)
    with pytest.raises(ToolkitError, match=r"not \w+ as the revision says"):
        fetch(revision=f"sha256-{pin}")


def test_a_folder_without_sums_is_read_from_its_index(fetch, published, models):
    (published / "SHA256SUMS").unlink()
    (published / "unused.safetensors").write_bytes(b"x")
    fetch()
    wanted = contents(published)
    del wanted["unused.safetensors"]
    assert contents(models / NAME) == wanted


def test_a_hashless_file_that_changes_on_the_way_is_refused_and_listed_anew(fetch, server, published, models):
    (published / "SHA256SUMS").unlink()
    server.faults.cuts.update({FIRST: 1})
    whole = bytearray((published / FIRST).read_bytes())
    server.faults.flip, server.faults.flips = {FIRST: 200}, 1  # the first piece is of another state
    with pytest.raises(ToolkitError, match=rf"{FIRST} has changed since it was listed"):
        fetch()
    fetch()
    assert (models / NAME / FIRST).read_bytes() == whole


def test_a_folder_with_no_listing_is_refused_with_what_to_do(fetch, published):
    (published / "SHA256SUMS").unlink()
    (published / "model.safetensors.index.json").unlink()
    with pytest.raises(ToolkitError, match="has neither SHA256SUMS nor") as caught:
        fetch()
    assert "sha256sum * > SHA256SUMS" in caught.value.hint


def test_the_rate_is_kept_over_all_files_and_told(fetch, published, said):
    total = sum(map(len, contents(published).values()))
    start = time.monotonic()
    fetch(rate=total // 2)
    assert 1.4 < time.monotonic() - start < 6


def test_progress_has_an_estimate(server, models):
    told = []
    server.faults.slow = 0.1
    origin = Origin(parse(f"{server.url}/folder/", "v1"))
    from toolkit.weights import pace

    pace.Meter.__init__.__kwdefaults__["every"] = 0.1
    try:
        bring(origin, Terms(models, parallel=1), told.append)
    finally:
        pace.Meter.__init__.__kwdefaults__["every"] = 3.0
    lines = [item for item in told if item.get("seconds_left")]
    assert lines
    assert re.search(r"kB of 600\.\d kB, \d+ %, .* kB/s, about \d+ s left", lines[-1]["line"])


def test_what_does_not_fit_is_told_as_a_sum_before_anything_is_fetched(fetch, server, models):
    with pytest.raises(ToolkitError, match=r"folder@v1 60\d\.\d kB \+ kept free .* = .* short"):
        fetch(min_free=1 << 60)
    assert not [item for item in server.asked if item[0] == "GET" and item[1].endswith(".safetensors")]


@pytest.fixture
def small(tmp_path):
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip(reason="mounts a small file system: needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_space_is_reserved_before_the_first_byte(fetch, server, small, published):
    server.faults.statuses[FIRST] = [403]
    with pytest.raises(ToolkitError):
        _into(server, small)
    part = small / NAME
    part = part.with_name(f"{NAME}.part")
    assert (part / FIRST).stat().st_blocks * 512 >= (published / FIRST).stat().st_size
    assert (part / FIRST).stat().st_size == 0


def test_a_disk_that_fills_meanwhile_is_told_and_the_next_run_goes_on(server, small, published, monkeypatch):
    (small / "filler").write_bytes(bytes(700_000))
    monkeypatch.setattr("toolkit.weights.bring.free_below", lambda folder: 1 << 40)  # it was free just before
    with pytest.raises(ToolkitError, match=r"No space left on device \(.* are free\)"):
        _into(server, small)
    assert not (small / NAME).exists()
    (small / "filler").unlink()
    _into(server, small)
    assert contents(small / NAME) == contents(published)


def test_a_disk_that_fills_while_writing_is_told_and_the_next_run_goes_on(
    server, small, published, monkeypatch
):
    (small / "filler").write_bytes(bytes(700_000))
    monkeypatch.setattr("toolkit.weights.bring.free_below", lambda folder: 1 << 40)
    monkeypatch.setattr("toolkit.weights.bring.take", lambda folder, files: False)  # it cannot reserve
    with pytest.raises(ToolkitError, match=r"(of-0000\d\.safetensors|\.arrived): No space"):
        _into(server, small)
    (small / "filler").unlink()
    server.sent = 0
    _into(server, small)
    assert contents(small / NAME) == contents(published)
    assert server.sent < sum(map(len, contents(published).values()))


def test_a_disk_without_room_for_the_marker_is_told_and_the_next_run_goes_on(server, small, monkeypatch):
    def full(folder, marker):
        raise OSError(28, "No space left on device", str(folder / MARKER))

    with monkeypatch.context() as patch:
        patch.setattr("toolkit.weights.bring.write_marker", full)
        with pytest.raises(ToolkitError, match=r"\.weights\.json: No space left on device"):
            _into(server, small)
    server.sent = 0
    _into(server, small)
    assert server.sent == 0
    assert damage(small / NAME) == []


def _into(server, models, revision="v1"):
    origin = Origin(parse(f"{server.url}/folder/", revision))
    return bring(origin, Terms(models), lambda value: None)


def test_two_runs_at_once_fetch_it_once(fetch, server, published):
    server.faults.slow = 0.05
    changed = []
    threads = [threading.Thread(target=lambda: changed.append(fetch()["changed"])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(changed) == [False, True]
    assert server.sent == sum(map(len, contents(published).values()))


def test_a_damaged_checkpoint_keeps_its_good_files(fetch, server, models, published):
    fetch()
    folder = models / NAME
    inode = (folder / SECOND).stat().st_ino
    (folder / FIRST).write_bytes(b"short")
    (folder / "stranger.json").write_text("{}")
    server.sent = 0
    assert fetch()["fetched"] == (published / FIRST).stat().st_size == server.sent
    assert contents(folder) == contents(published)
    assert (folder / SECOND).stat().st_ino == inode


def test_a_copied_or_touched_file_is_read_and_not_fetched(fetch, server, models):
    fetch()
    folder = models / NAME
    touch_again(folder / FIRST)
    shutil.copy(folder / SECOND, folder / "copy")
    (folder / "copy").rename(folder / SECOND)
    assert len(damage(folder)) == 2
    server.asked.clear()
    assert fetch()["changed"] is False
    assert server.asked == []
    assert damage(folder) == []


@pytest.mark.parametrize("ended", ["before", "between", "after"])
def test_an_end_at_the_renames_loses_nothing(fetch, server, models, published, ended):
    fetch()
    folder, part = models / NAME, models / f"{NAME}.part"
    if ended == "before":
        folder.rename(part)
    elif ended == "between":
        shutil.copytree(folder, models / f".{NAME}.old")
        folder.rename(part)
    else:
        shutil.copytree(folder, models / f".{NAME}.old")
    server.sent = 0
    fetch()
    assert server.sent == 0
    assert contents(folder) == contents(published)
    assert sorted(path.name for path in models.iterdir()) == [f".{NAME}.lock", NAME]


def test_another_source_of_the_same_name_is_no_update(fetch, server, models):
    fetch()
    other = server.url.replace("127.0.0.1", "127.0.0.2")
    wanted = rf"holds {server.url}/folder/ at v1, not {other}/folder/ at v1"
    with pytest.raises(ToolkitError, match=wanted):
        fetch(f"{other}/folder/")
    (models / NAME / FIRST).unlink()
    with pytest.raises(ToolkitError, match=wanted):
        fetch(f"{other}/folder/")
    with pytest.raises(ToolkitError, match=wanted):
        plan(
            {"root": str(models.parent), "requests": [{"source": f"{other}/folder/", "revision": "v1"}]},
            print,
        )


def test_a_mirror_of_a_pinned_checkpoint_is_the_same(server, published, models):
    pin = f"sha256-{hashlib.sha256((published / 'SHA256SUMS').read_bytes()).hexdigest()}"
    _into(server, models, pin)
    (models / f"folder@{pin}" / FIRST).unlink()
    with publishing(published) as mirror:
        assert _into(mirror, models, pin)["fetched"] == (published / FIRST).stat().st_size


def test_the_space_stays_reserved_when_a_file_is_begun_again(fetch, server, models, published):
    server.faults.flip, server.faults.flips = {FIRST: 5000}, 99
    with pytest.raises(ToolkitError):
        fetch(parallel=1)
    status = (models / f"{NAME}.part" / FIRST).stat()
    assert status.st_size == 0
    assert status.st_blocks * 512 >= (published / FIRST).stat().st_size


def test_the_marker_is_json_with_what_people_ask_for(fetch, models, server):
    fetch()
    marker = json.loads((models / NAME / MARKER).read_text())
    assert marker["source"] == f"{server.url}/folder/ at v1"
    assert set(marker["files"][FIRST]) == {"size", "mtime_ns", "inode", "sha256", "corrupt"}
