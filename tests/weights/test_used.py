"""What is on a host, who needs it, and removing it; verifying."""

import json
import threading

import pytest

from tests.weights.checkpoints import contents, touch_again
from toolkit.errors import ConfigError, ToolkitError
from toolkit.layout import Layout
from toolkit.weights import work
from toolkit.weights.store import alone, damage, read_marker
from toolkit.weights.used import models as listed
from toolkit.weights.used import remove
from toolkit.weights.verify import verify

NAME = "folder@v1"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path)


def release(layout, service, name, source, *, current=False, revision="v1"):
    folder = layout.services / service / "releases" / name
    folder.mkdir(parents=True)
    profile = {"model": {"target": {"source": source, "revision": revision}, "drafter": None}}
    (folder / "profile.json").write_text(json.dumps(profile))
    if current:
        (layout.services / service / "current").symlink_to(folder)


def quiet(_):
    pass


def test_what_is_there_is_told_with_who_needs_it(fetch, server, layout):
    fetch()
    release(layout, "kimi", "r1", f"{server.url}/folder/", current=True)
    release(layout, "other", "r9", str(layout.models / NAME), revision=None)
    (layout.models / "half@v2.part").mkdir()
    (layout.models / "half@v2.part" / "x").write_bytes(b"123")
    (layout.models / "by-hand").mkdir()
    found = {item["model"]: item for item in listed(layout)}
    assert sorted(found) == [NAME, "half@v2"]
    assert found[NAME]["used_by"] == ["kimi r1", "other r9"]
    assert (found[NAME]["complete"], found[NAME]["damage"]) == (True, [])
    assert (found["half@v2"]["complete"], found["half@v2"]["bytes"]) == (False, 3)


def test_what_the_current_release_needs_is_never_removed(fetch, server, layout):
    fetch()
    release(layout, "kimi", "r1", f"{server.url}/folder/", current=True)
    with pytest.raises(ConfigError, match=r"needed by the current release: kimi r1"):
        remove(layout, NAME, force=True, say=quiet)
    assert damage(layout.models / NAME) == []


def test_what_an_earlier_release_needs_is_removed_only_by_force(fetch, server, layout):
    fetch()
    release(layout, "kimi", "r1", f"{server.url}/folder/")
    with pytest.raises(ConfigError, match=r"needed by an earlier release: kimi r1"):
        remove(layout, NAME, force=False, say=quiet)
    size = sum(path.stat().st_size for path in (layout.models / NAME).iterdir())
    assert remove(layout, NAME, force=True, say=quiet) == size
    assert list(layout.models.iterdir()) == []


def test_a_part_is_removed_too(layout):
    (layout.models / "half@v2.part").mkdir(parents=True)
    remove(layout, "half@v2", force=False, say=quiet)
    assert list(layout.models.iterdir()) == []


@pytest.mark.parametrize("name", ["absent@v1", "../services@x", "folder", "folder@v1.part", ""])
def test_only_a_checkpoint_is_removed(fetch, layout, name):
    fetch()
    with pytest.raises(ConfigError, match="no model") as caught:
        remove(layout, name, force=True, say=quiet)
    assert NAME in caught.value.message
    assert (layout.models / NAME).is_dir()


def test_what_is_being_fetched_is_not_removed(fetch, layout):
    fetch()
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with alone(layout.models, NAME, quiet):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    with pytest.raises(ToolkitError, match="is being fetched or checked just now"):
        remove(layout, NAME, force=False, say=quiet)
    leave.set()
    thread.join()
    assert (layout.models / NAME).is_dir()


def test_verifying_finds_what_size_time_and_inode_do_not_show(fetch, layout, published):
    fetch()
    folder = layout.models / NAME
    status = (folder / FIRST).stat()
    with (folder / FIRST).open("r+b") as file:
        file.seek(500)
        byte = file.read(1)
        file.seek(500)
        file.write(bytes([byte[0] ^ 1]))
    import os

    os.utime(folder / FIRST, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert damage(folder) == []
    wrong = [f"{FIRST} is corrupt: its SHA-256 is not the one that it came with"]
    assert verify(folder, quiet) == wrong
    assert damage(folder) == wrong  # remembered, so that the next deploy fetches it
    assert fetch()["fetched"] == (published / FIRST).stat().st_size
    assert contents(folder) == contents(published)
    assert verify(folder, quiet) == []


def test_verifying_gives_what_is_the_same_a_new_mark(fetch, layout):
    fetch()
    folder = layout.models / NAME
    touch_again(folder / FIRST)
    assert len(damage(folder)) == 1
    assert verify(folder, quiet) == []
    assert read_marker(folder).files[FIRST].mtime_ns == (folder / FIRST).stat().st_mtime_ns


@pytest.mark.parametrize("spoil", ["missing", "link", "short", "extra"])
def test_other_damage_is_named(fetch, layout, published, spoil):
    fetch()
    folder = layout.models / NAME
    if spoil == "extra":
        (folder / "pytorch_model.bin").write_bytes(b"x")
        wanted = "pytorch_model.bin does not belong to it"
    else:
        (folder / FIRST).unlink()
        wanted = f"{FIRST} is missing"
    if spoil == "link":
        (folder / FIRST).symlink_to(published / FIRST)
        wanted = f"{FIRST} has"
    if spoil == "short":
        (folder / FIRST).write_bytes(b"x")
        wanted = f"{FIRST} has 1 bytes, not"
    assert damage(folder)[0].startswith(wanted)
    assert verify(folder, quiet)[0].startswith(wanted)


def test_a_plan_tells_bytes_source_and_sum(fetch, server, layout, published):
    item = {"source": f"{server.url}/folder/", "revision": "v1"}
    total = sum(map(len, contents(published).values()))
    answer = work.plan({"requests": [item], "root": str(layout.root)}, quiet)
    assert answer["lacking"] == [
        {
            "folder": NAME,
            "why": "it is not there",
            "bytes": total,
            "problem": None,
            "hint": None,
            "from": f"{server.url}/folder/ at v1",
        }
    ]
    assert answer["short"] is None
    answer = work.plan({"requests": [item], "root": str(layout.root), "min_free": 1 << 60}, quiet)
    assert answer["short"].startswith(f"not enough disk below {layout.models}: {NAME} 600.4 kB + kept free")
    fetch()
    server.asked.clear()
    assert work.plan({"requests": [item], "root": str(layout.root)}, quiet)["lacking"] == []
    (layout.models / NAME / FIRST).unlink()
    again = work.plan({"requests": [item], "root": str(layout.root)}, quiet)["lacking"][0]
    assert (again["why"], again["bytes"]) == (f"{FIRST} is missing", (published / FIRST).stat().st_size)


def test_a_plan_says_when_the_source_cannot_be_asked(layout):
    item = {"source": "http://127.0.0.1:1/folder/", "revision": "v1"}
    found = work.plan({"requests": [item], "root": str(layout.root)}, quiet)["lacking"][0]
    assert found["bytes"] is None
    assert "Connection refused" in found["problem"]
