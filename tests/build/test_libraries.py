"""Hash-locked libraries: real virtual environments and a real pip, with wheels made on the spot."""

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.build.wheels import lock_for, make_wheel
from toolkit.build.libraries.install import MARKER, Place, damage, ensure, interpreter
from toolkit.build.lock import lock_of, needs_cuda
from toolkit.errors import ConfigError, ToolkitError
from toolkit.service import detached


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    return folder


@pytest.fixture
def place(tmp_path, house):
    return Place(tmp_path / "envs", tmp_path / "wheels", house)


def imported(folder: Path, module: str) -> bool:
    done = subprocess.run([interpreter(folder), "-c", f"import {module}"], capture_output=True, check=False)
    return done.returncode == 0


def test_what_the_lock_names_is_installed_once(house, place):
    lock = lock_for(
        make_wheel(house, "torch", "2.0"), make_wheel(house, "triton"), make_wheel(house, "plain")
    )
    said: list[str] = []
    assert ensure(lock, place, said.append)
    folder = place.environments / lock.folder_name
    assert damage(folder, lock.sha256) is None
    assert (imported(folder, "plain"), imported(folder, "torch")) == (True, True)
    assert not imported(folder, "triton")  # this torch asks for no CUDA
    marker = json.loads((folder / MARKER).read_text())
    assert (marker["lock"], marker["cuda"]) == (lock.sha256, False)
    assert marker["versions"]["torch"] == "2.0"
    assert not place.wheels.exists()
    assert said
    assert not ensure(lock, place, said.append)


def test_a_torch_that_asks_for_cuda_gets_its_libraries(house, place):
    torch = make_wheel(house, "torch", "2.0", requires="Requires-Dist: nvidia-blas\n")
    lock = lock_for(torch, make_wheel(house, "nvidia_blas"))
    assert needs_cuda(torch)
    # Another engine's downloads, whose libraries may be installed at the same time.
    theirs = place.wheels / "lib-0123456789abcdef" / "wanted.txt"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    ensure(lock, place, lambda _: None)
    assert imported(place.environments / lock.folder_name, "nvidia_blas")
    assert list(place.wheels.rglob("*")) == [theirs.parent, theirs]


def test_a_run_that_was_ended_is_done_anew(house, place):
    lock = lock_for(make_wheel(house, "torch"))
    folder = place.environments / lock.folder_name
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "half").touch()
    assert "not finished" in damage(folder, lock.sha256)
    assert ensure(lock, place, lambda _: None)
    assert not (folder / "lib" / "half").exists()


def test_a_damaged_environment_is_made_anew_under_its_own_interpreter(house, place):
    lock = lock_for(make_wheel(house, "torch"), make_wheel(house, "plain"))
    ensure(lock, place, lambda _: None)
    folder = place.environments / lock.folder_name
    serving = subprocess.Popen(
        [interpreter(folder), "-c", "input(); import plain"], stdin=subprocess.PIPE, text=True
    )
    (folder / MARKER).unlink()
    code = (
        "import sys; from pathlib import Path; from toolkit.build.lock import Lock;"
        "from toolkit.build.libraries.install import Place, ensure;"
        f"ensure(Lock({lock.engine!r}, sys.stdin.read()), Place(*map(Path, sys.argv[1:])), print)"
    )
    places = [place.environments, place.wheels, place.wheelhouse]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [interpreter(folder), "-P", "-c", code, *places]
    done = subprocess.run(
        command, input=lock.text, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert damage(folder, lock.sha256) is None
    serving.communicate("\n", timeout=30)
    assert serving.returncode == 0  # what ran under the old one goes on
    assert not list(place.environments.glob(".*.new")) + list(place.environments.glob(".*.old"))


def test_its_programs_name_the_place_that_it_has_taken(house, place):
    lock = lock_for(make_wheel(house, "torch"))
    ensure(lock, place, lambda _: None)
    folder = place.environments / lock.folder_name
    shown = subprocess.run([folder / "bin" / "pip", "--version"], capture_output=True, text=True, check=True)
    assert str(folder) in shown.stdout
    texts = [path.read_bytes() for path in (folder / "bin").iterdir() if not path.is_symlink()]
    assert any(os.fsencode(folder / "bin" / "python") in text for text in texts)
    assert not any(b".new" in text for text in texts)


def test_a_damaged_environment_stays_where_it_cannot_be_made_anew(house, place):
    lock = lock_for(make_wheel(house, "torch"), gone := make_wheel(house, "gone"))
    half = place.environments / lock.folder_name / "half"
    half.parent.mkdir(parents=True)
    half.touch()
    gone.unlink()
    with pytest.raises(ToolkitError, match="gone==1"):
        ensure(lock, place, lambda _: None)
    assert half.exists()
    assert sorted(path.name for path in place.environments.iterdir()) == [
        f".{lock.folder_name}.lock",
        lock.folder_name,
    ]


@pytest.mark.parametrize("spoilt", ["torch", "plain"])
def test_a_file_that_differs_from_the_lock_is_refused(house, place, spoilt):
    wheels = [make_wheel(house, "torch"), make_wheel(house, "plain")]
    lock = lock_for(*wheels)
    make_wheel(house, spoilt, requires="Summary: another\n")
    with pytest.raises(ToolkitError, match=rf"{spoilt}\S* from the wheelhouse .* its sha256 differs"):
        ensure(lock, place, lambda _: None)
    assert not (place.environments / lock.folder_name).exists()


def test_what_the_wheelhouse_lacks_is_named(house, place):
    lock = lock_for(make_wheel(house, "torch"), gone := make_wheel(house, "gone"))
    gone.unlink()
    said = rf"gone==1\.0 for Python .* is not in the wheelhouse {house}"
    with pytest.raises(ToolkitError, match=said) as caught:
        ensure(lock, place, lambda _: None)
    assert caught.value.hint.startswith("ddtoolkit wheelhouse --out DIR --python 3.")
    assert caught.value.hint.endswith(f"; then bring it to {house}")


def test_a_missing_wheelhouse_is_named(tmp_path, house):
    lock = lock_for(make_wheel(house, "torch"))
    place = Place(tmp_path / "envs", tmp_path / "wheels", tmp_path / "elsewhere")
    with pytest.raises(ToolkitError, match=f"no wheelhouse {tmp_path / 'elsewhere'} on this host"):
        ensure(lock, place, lambda _: None)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_leaves_nothing_behind_and_is_named(tmp_path, house):
    wheel = make_wheel(house, "torch")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", small], check=True)
    try:
        place = Place(small / "envs", tmp_path / "wheels", house)
        lock = lock_for(wheel)
        with pytest.raises(ToolkitError, match=r"No space left on device \(\d+ MiB are free\)"):
            ensure(lock, place, lambda _: None)
        assert not (place.environments / lock.folder_name).exists()
    finally:
        subprocess.run(["umount", small], check=True)


def test_two_builds_of_one_folder_take_turns(house, place):
    lock = lock_for(make_wheel(house, "torch"))
    ended: list[bool] = []
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda: ended.append(ensure(lock, place, said.append))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == [False, True]


def test_the_lock_of_the_embedded_engine_has_a_hash_for_every_requirement():
    lock = lock_of("embedded")
    assert all("--hash=sha256:" in block for block in lock.blocks())
    assert {"torch", "pydantic", "httpx", "pyyaml", "fastapi"} <= lock.versions().keys()
    assert "://" not in lock.text


def test_a_watcher_hears_of_work_that_says_nothing(tmp_path, monkeypatch):
    log = tmp_path / "thing.log"
    runs = iter([True, True, True, False])

    def running(_):
        found = next(runs)
        if not found:
            log.write_text('{"changed": true}\n')
        return found

    monkeypatch.setattr(detached, "_runs", running)
    monkeypatch.setattr(detached, "_start", lambda *_: None)
    monkeypatch.setattr(detached, "_POLL", 0.02)
    monkeypatch.setattr(detached, "_BEAT", 0.01)
    told: list[dict] = []
    assert detached.watch("thing", [], tmp_path, told.append, module="thing", what="a thing") == 0
    assert told[0] == {"beat": 1}
    assert told[-1] == {"changed": True}


def test_an_engine_without_a_lock_is_refused():
    with pytest.raises(ConfigError, match="'other' has no locked requirements"):
        lock_of("other")
