"""Wheels brought to a store, by the very programs that do it over SSH, here on this machine."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.build.wheels import Site, checksums, lock_for, make_wheel, sha256
from toolkit.build.libraries.install import MARKER, ensure, interpreter
from toolkit.build.libraries.place import place_in
from toolkit.build.lock import Lock, lock_of
from toolkit.build.wheel_store import Store, Wheel
from toolkit.build.wheelhouse import Target, here, make
from toolkit.build.wheels.house import open_house
from toolkit.errors import ConfigError, ToolkitError
from toolkit.fleet.send_wheels import needed_by
from toolkit.inventory.host import Host
from toolkit.layout import Layout
from toolkit.weights.store import alone

HOST = Host("box", {"ansible_connection": "local"})


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path, HOST, tmp_path / "root")


def test_what_is_lacking_comes_once_and_is_told_with_its_rate(site):
    needed = needed_by(HOST, site.order(), site.tell)
    assert not site.store.exists()
    assert (len(needed.lacking), needed.short) == (2, None)
    assert site.bring()["files"] == 2
    assert site.whole()
    assert any("MB sent and checked in" in line and "/s" in line for line in site.said)
    assert Store(Layout(site.root)).brought(site.lock)
    assert {path.stat().st_mode & 0o777 for path in site.store.glob("*.whl")} == {0o644}
    assert site.bring() == {"files": 0, "bytes": 0}
    assert not list(site.store.glob("*.part"))


def test_a_wheel_that_differs_is_replaced_and_the_other_is_not_sent(site):
    site.bring()
    status = (site.store / site.small.name).stat()
    with (site.store / site.large.name).open("r+b") as file:
        file.seek(1000)
        file.write(b"rotten")
    assert site.bring()["files"] == 1
    assert site.whole()
    assert (site.store / site.small.name).stat().st_ino == status.st_ino


def test_what_has_come_is_not_sent_again(site):
    data = site.large.read_bytes()
    site.store.mkdir(parents=True)
    (site.store / f".{site.large.name}.part").write_bytes(data[:2_000_000])
    sent = site.bring()
    assert sent == {"files": 2, "bytes": len(data) - 2_000_000 + site.small.stat().st_size}
    assert site.whole()


def test_one_that_had_come_to_its_last_byte_is_only_checked(site):
    site.store.mkdir(parents=True)
    (site.store / f".{site.large.name}.part").write_bytes(site.large.read_bytes())
    assert site.bring() == {"files": 2, "bytes": site.small.stat().st_size}
    assert site.whole()


def test_a_part_that_is_something_else_costs_a_second_round(site):
    site.store.mkdir(parents=True)
    (site.store / f".{site.large.name}.part").write_bytes(b"x" * 2_000_000)
    site.bring()
    assert site.whole()
    assert f"sending once more what came damaged: {site.large.name}" in site.said


def test_a_damaged_wheel_is_refused_by_name_before_anything_is_sent(site):
    data = bytearray(site.large.read_bytes())
    data[1000] ^= 1
    site.large.write_bytes(data)
    with pytest.raises(ToolkitError, match=rf"{site.large} is damaged: .*nothing was sent") as caught:
        site.bring()
    assert f"ddtoolkit wheelhouse --out {site.house}" in caught.value.hint
    assert not list(site.store.glob("*.whl"))


def test_a_truncated_wheel_is_refused_by_name(site):
    site.large.write_bytes(site.large.read_bytes()[:1000])
    with pytest.raises(ToolkitError, match=rf"{site.large} is damaged"):
        site.bring()


def test_what_the_folder_lacks_is_named_with_the_host_that_needs_it(site):
    (site.house / "SHA256SUMS").write_text(f"{sha256(site.small)}  {site.small.name}\n")
    version = here().python
    with pytest.raises(ConfigError, match=rf"has no large==1\.0 .* for Python {version} on") as caught:
        site.bring()
    assert f"--python {version}" in caught.value.hint
    make_wheel(site.house, "large", requires="Summary: another\n")
    checksums(site.house)
    with pytest.raises(ConfigError, match=f"the lock names other files than {site.large.name}"):
        site.bring()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "SHA256SUMS: No such file"),
        ("0123  x.whl\n", "SHA256SUMS:1: is no checksum and name: '0123  x"),
    ],
)
def test_a_folder_without_whole_checksums_is_none(site, text, said):
    (site.house / "SHA256SUMS").unlink()
    if text is not None:
        (site.house / "SHA256SUMS").write_text(text)
    with pytest.raises(ToolkitError, match=said):
        site.order()


def test_what_does_not_fit_is_refused_before_the_first_byte(site):
    free = 1 << 60
    words = (
        r"not enough disk below .*: wheels 3\.0 MB \+ the environment that is made of them 3\.0 MB \+ kept"
    )
    with pytest.raises(ToolkitError, match=words):
        site.bring(min_free=free)
    assert [path.name for path in site.store.iterdir()] == [".wheels.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_disk_that_fills_up_is_told_and_what_came_stays(site, monkeypatch):
    site.store.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M,mode=0755", "tmpfs", site.store], check=True)
    try:
        # The sum is of another disk, as where something else fills this one meanwhile.
        monkeypatch.setattr("toolkit.fleet.send_wheels.module_on", blind)
        with pytest.raises(
            ToolkitError, match=r"box: .*No space left on device \(\S+ \S+ are free\)"
        ) as caught:
            site.bring()
        assert "it goes on with what has come" in caught.value.hint
        assert not list(site.store.glob("*.txt"))
    finally:
        subprocess.run(["umount", site.store], check=True)
    monkeypatch.undo()
    site.bring()
    assert site.whole()


def blind(host, module):
    """The module, which takes every disk for large and reserves nothing."""
    from toolkit.remote.agent import module_on

    return module_on(host, ["tests.build.blind_store"])


def test_installed_libraries_need_no_wheels(site):
    folder = Layout(site.root).environments / site.lock.folder_name
    interpreter(folder).parent.mkdir(parents=True)
    interpreter(folder).symlink_to(sys.executable)
    (folder / MARKER).write_text(json.dumps({"lock": site.lock.sha256}))
    assert needed_by(HOST, site.order(), site.tell) is None
    assert site.bring() == {"files": 0, "bytes": 0}
    assert not site.store.exists()


def test_what_was_brought_is_installed_from_whatever_the_profile_says(site):
    layout = Layout(site.root)
    elsewhere = Path("/nowhere")
    assert place_in(layout, site.lock, elsewhere).wheelhouse == elsewhere
    site.bring()
    assert place_in(layout, site.lock, elsewhere).wheelhouse == site.store
    assert place_in(layout, lock_for(site.small), elsewhere).wheelhouse == elsewhere


def test_a_wheel_that_rots_in_the_store_is_refused_by_name_and_brought_anew(site):
    layout = Layout(site.root)
    site.bring()
    make_wheel(site.store, "small", requires="Summary: another\n")
    with pytest.raises(ToolkitError, match=rf"small\S* from the wheelhouse {site.store} is not the file"):
        ensure(site.lock, place_in(layout, site.lock, None), site.said.append)
    assert not (layout.environments / site.lock.folder_name).exists()
    assert site.bring()["files"] == 1
    assert site.whole()


def test_two_that_bring_the_same_take_turns(site):
    ended: list[dict] = []
    threads = [threading.Thread(target=lambda: ended.append(site.bring())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item["files"] for item in ended) == [0, 2]
    assert site.whole()


def test_a_sender_that_falls_silent_is_given_up():
    text = "import toolkit.build.wheels.__main__ as m; m._SILENCE = 0.5; m._BEAT = 0.2; m.main()"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        begin = time.monotonic()
        assert child.wait(30) == 1
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize("name", ["../x.whl", "/etc/x.whl", ".x.whl", "x.txt", ""])
def test_a_name_that_leads_elsewhere_is_no_wheels(name):
    with pytest.raises(ToolkitError, match="is no name of a wheel"):
        Wheel(name, "0" * 64, 1)


def test_of_the_files_of_a_distribution_the_best_for_that_host_is_taken(tmp_path):
    plain = make_wheel(tmp_path, "thing")
    for tag in ("cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_x86_64"):
        (tmp_path / f"thing-1.0-{tag}.whl").write_bytes(plain.read_bytes() + tag.encode())
    hashes = " \\\n".join(f"    --hash=sha256:{sha256(path)}" for path in tmp_path.glob("*.whl"))
    lock = Lock("mini", f"thing==1.0 \\\n{hashes}\n")
    house = open_house(checksums(tmp_path))
    hosts = {"cp311": ("3.11", "x86_64"), "cp312": ("3.12", "x86_64"), "py3": ("3.13", "x86_64")}
    for tag, host in (*hosts.items(), ("py3", ("3.11", "aarch64"))):
        (wheel,) = house.wheels_for(lock, Target(*host))
        assert wheel.name.split("-")[2] == tag
    plain.unlink()
    checksums(tmp_path)
    with pytest.raises(ConfigError, match=r"has no thing==1\.0 of the mini engine's lock for Python 3\.13"):
        open_house(tmp_path).wheels_for(lock, Target("3.13", "x86_64"))


def link(path):
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (link, "is a link, so no wheels are kept there"),
        (os.mkfifo, "is no folder"),
        (Path.touch, "is no folder"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), r"may be written by others \(mode 0777\)"),
    ],
)
def test_what_is_in_the_stores_place_is_named_and_left_alone(site, make, said):
    site.store.parent.mkdir()
    make(site.store)
    for ask in (lambda: needed_by(HOST, site.order(), site.tell), site.bring):
        with pytest.raises(ToolkitError, match=f"box: {site.store} {said}") as caught:
            ask()
        assert "free some space" not in caught.value.hint
    assert list(Store(Layout(site.root)).unused([], -1.0)) == []
    assert [path for path in site.store.parent.rglob("*") if path.is_file()] in ([], [site.store])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_wheel_of_another_user_is_not_installed_and_is_replaced(site):
    layout = Layout(site.root)
    site.bring()
    os.chown(site.store / site.large.name, 65534, -1)
    with pytest.raises(ToolkitError, match=rf"{site.large.name} belongs to user nobody, who could change"):
        place_in(layout, site.lock, None)
    assert site.bring()["files"] == 1
    assert place_in(layout, site.lock, None).wheelhouse == site.store
    assert (site.store / site.large.name).stat().st_uid == 0


def test_prune_takes_what_no_lock_needs(site):
    store = Store(Layout(site.root))
    site.bring()
    name, version = next(iter(sorted(lock_of("embedded").pins())))
    needed = site.store / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    part = site.store / ".large-1.0-py3-none-any.whl.part"
    (site.store / f"{lock_of('embedded').folder_name}.txt").write_text(lock_of("embedded").text)
    for path in (needed, part):
        path.touch()
    assert list(store.unused([], 600.0)) == []  # too young
    own = f"{site.lock.folder_name}.txt"
    assert {path.name for path in store.unused([], -1.0)} == {
        own, part.name, site.large.name, site.small.name,
    }  # fmt: skip
    assert {path.name for path in store.unused([site.lock.folder_name], -1.0)} == {part.name}
    assert list(Store(Layout(site.root / "none")).unused([], -1.0)) == []


def test_prune_leaves_what_is_being_brought_and_what_is_no_wheel(site):
    store = Store(Layout(site.root))
    site.bring()
    stray, part = site.store / "torch.whl", site.store / ".large-1.0-py3-none-any.whl.part"
    for path in (stray, part):
        path.touch()
    with alone(site.store, "wheels", print):
        assert list(store.unused([], -1.0)) == []
    found = set(store.unused([], -1.0))
    assert part in found
    assert stray not in found


def test_what_the_index_lacks_is_named_with_what_helps(tmp_path, monkeypatch):
    lock = lock_for(make_wheel(tmp_path, "gone"))
    empty = tmp_path / "index"
    empty.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(ToolkitError) as caught:
        make(lock, tmp_path / "out", Target("3.13", "x86_64"), (), lambda _: None)
    assert caught.value.message.endswith("has no wheel of gone==1.0 for Python 3.13 on x86_64")
    assert "--with WHEEL" in caught.value.hint
    assert "run it again" not in caught.value.hint
