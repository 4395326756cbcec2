"""Measurements as they are made: real processes, on a CPU with gloo, and programs that misbehave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.raw import raw
from tests.doctor.recorded import Site, pcie
from toolkit.doctor.facts import Facts
from toolkit.doctor.load import all_reduce, copies, record, run
from toolkit.doctor.load.confine import Way
from toolkit.doctor.load.measure import groups_of, load_on
from toolkit.doctor.load_result import Copy, LinkSeen, Load, Peer, Run, read_copies, read_reduced
from toolkit.doctor.request import load_request
from toolkit.doctor.wanted import wanted_of
from toolkit.layout import Layout
from toolkit.profile.loading import load_profile
from toolkit.release.lock import Lock

ROOT = Path(__file__).parents[2]
OUTPUTS = Path(__file__).with_name("outputs")
TWO = [{"index": index, "uuid": "", "address": f"cpu{index}"} for index in (0, 1)]
SMALL = {"device": "cpu", "gpus": TWO, "bytes": 1 << 16, "seconds": 0.01}
REDUCE = {"device": "cpu", "gpus": TWO, "groups": [[0, 1]], "sizes": [64, 4096], "iterations": 5}


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Makes a program that stands where the interpreter with torch is."""

    def make(text: str, silence: float = 20.0) -> Way:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return Way(str(path), {"MARK": str(tmp_path)}, None, None, limit=30.0, silence=silence)

    return make


def left_of(tmp_path: Path) -> list[str]:
    """Processes that a measurement left behind."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and f"MARK={tmp_path}".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_without_a_profile_it_measures_what_it_is_told_to() -> None:
    """One GPU, so that torch is loaded once: all-reduces are run below, and both on hosts."""
    command = [sys.executable, "-P", "-m", "toolkit.doctor.load", "--device", "cpu", "--gpus", "3"]
    command += ["--mib", "1", "--seconds", "0.02", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["copying"]["end"], found["reducing"]["end"]) == ("done", "skipped")
    assert [(item["gpu"], item["wrong"]) for item in found["alone"]] == [(3, 0)]
    assert set(found["figures"]) == {
        "copy to GPU 3", "copy from GPU 3", "copy to GPU 3, all at once", "copy from GPU 3, all at once",
    }  # fmt: skip
    assert all(value > 0 for value in found["figures"].values())


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a measurement whose code was changed."""

    def make(
        task: str, request: dict[str, Any], *changes: tuple[str, str]
    ) -> tuple[list[dict[str, Any]], Run]:
        text = (run._FOLDER / f"{task}.py").read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        shutil.copy(run._FOLDER / "common.py", tmp_path)
        (tmp_path / f"{task}.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(run, "_FOLDER", tmp_path)
        return run.measure(task, request, Way(sys.executable, limit=60.0))

    return make


def wrong_in(lines: list[dict[str, Any]]) -> dict[str, set[int]]:
    """What was counted as wrong, by what was measured."""
    found: dict[str, set[int]] = {}
    for line in lines:
        for name, item in line.items():
            if isinstance(item, dict) and item.get("wrong"):
                found.setdefault(name, set()).add(item["wrong"])
    return found


def test_bytes_that_arrive_wrong_are_counted(altered: Any) -> None:
    lines, ended = altered(
        "copies", SMALL,
        ("self.here.copy_(self.out, non_blocking=True)", "self.here.copy_(self.out)[7:9] ^= 1"),
        ("target.other.copy_(source.here, non_blocking=True)", "target.other.copy_(sent)[5] ^= 1"),
    )  # fmt: skip
    assert ended.end == "done", ended
    assert wrong_in(lines) == {"alone": {2}, "together": {2}, "peer": {1}}


def test_a_sum_that_is_wrong_is_counted(altered: Any) -> None:
    lines, ended = altered(
        "all_reduce",
        REDUCE,
        ("    values = base + rank\n", "    values = base + rank\n    values[3] += rank\n"),
    )
    assert ended.end == "done", ended
    assert wrong_in(lines) == {"reduced": {1}}


def test_a_rank_that_fails_does_not_leave_the_others_waiting(altered: Any) -> None:
    begun = time.monotonic()
    broken = (
        "    torch = load_torch(request)\n",
        "    assert rank != 1, 'bad GPU'\n    torch = load_torch(request)\n",
    )
    lines, ended = altered("all_reduce", REDUCE, broken)
    assert time.monotonic() - begun < 20
    assert (ended.end, ended.said) == ("failed", "AssertionError: bad GPU")
    assert read_reduced(lines)["faulty"] == 1


def test_a_program_that_hangs_is_killed_with_what_it_began_and_the_step_is_named(
    program: Any, tmp_path: Path
) -> None:
    way = program(
        """echo '{"at": "copying to GPU 1"}'; trap '' TERM INT HUP; (setsid sleep 600 &); sleep 600""",
        silence=1.0,
    )
    begun = time.monotonic()
    lines, ended = run.measure("copies", SMALL, way)
    assert time.monotonic() - begun < 4
    assert (ended.end, ended.at, ended.left) == ("silent", "copying to GPU 1", ())
    assert lines == [{"at": "copying to GPU 1"}]
    assert left_of(tmp_path) == []


def test_a_program_that_goes_on_for_too_long_is_killed(program: Any, tmp_path: Path) -> None:
    way = program("""while :; do echo '{"at": "x"}'; sleep 0.2; done""")
    ended = run.measure("copies", SMALL, Way(way.python, way.environment, limit=1.0, silence=20.0))[1]
    assert ended.end == "slow"
    assert left_of(tmp_path) == []


def test_a_crash_is_told_with_its_signal_and_last_words(program: Any) -> None:
    way = program("""echo '{"at": "loading torch"}'; echo 'no good' >&2; kill -SEGV $$""")
    ended = run.measure("copies", SMALL, way)[1]
    assert (ended.end, ended.at, ended.status) == ("ended", "loading torch", -signal.SIGSEGV)
    assert "no good" in ended.said


def test_garbage_is_no_measurement(program: Any) -> None:
    way = program(
        "head -c 100000 /dev/urandom; echo; echo '[1]'; echo '{\"alone\": 7}'; echo '{\"done\": true}'"
    )
    lines, ended = run.measure("copies", SMALL, way)
    assert ended.end == "done"
    assert read_copies(lines, {}) == {"software": {}, "alone": (), "together": (), "links": (), "peers": ()}


def test_a_flood_is_ended(program: Any, tmp_path: Path) -> None:
    ended = run.measure("copies", SMALL, program("exec cat /dev/zero"))[1]
    assert ended.end == "flooded"
    assert len(ended.said) <= 800
    assert left_of(tmp_path) == []


def test_what_ends_without_a_word_has_not_measured(program: Any) -> None:
    assert run.measure("copies", SMALL, program("exit 0"))[1].end == "ended"


def test_a_program_that_is_none_is_told() -> None:
    ended = run.measure("copies", SMALL, Way("/nowhere/python"))[1]
    assert (ended.end, ended.said) == ("unstarted", "/nowhere/python: No such file or directory")


def test_an_interpreter_without_torch_is_told(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    lines, ended = run.measure("copies", SMALL, Way(str(tmp_path / "bare" / "bin" / "python")))
    assert (ended.end, ended.at) == ("failed", "loading torch")
    assert ended.said == "ModuleNotFoundError: No module named 'torch'"
    assert lines[0] == {"at": "loading torch"}


def test_ways_and_warnings_are_read_from_nccls_own_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Forms of NCCL 2.18 to 2.27, as logs in its public issues have them.
    (tmp_path / "nccl-0").write_text(
        "gpu1:11:31 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "gpu1:11:31 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/direct pointer\n"
        "gpu1:11:31 [0] NCCL INFO Channel 02 : 0[0] -> 1[1] via SHM/direct/direct\n"
        "gpu1:11:31 [0] NCCL INFO Connected all rings\n",
        encoding="utf-8",
    )
    (tmp_path / "nccl-1").write_text(
        "gpu1:12:32 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/2/GDRDMA\n"
        "gpu1:12:32 [1] transport/p2p.cc:302 NCCL WARN Cuda failure 217 'peer access is not supported'\n",
        encoding="utf-8",
    )
    log = all_reduce.NcclLog(tmp_path)
    log.scan()
    log.scan()  # tells nothing that it told already
    (line,) = capfd.readouterr().out.splitlines()
    found = read_reduced([json.loads(line)])
    assert found["ways"] == {"P2P": 2, "SHM": 1, "NET": 1}
    assert found["warned"] == ("Cuda failure 217 'peer access is not supported'",)


@pytest.fixture
def asked(program: Any, tmp_path: Path) -> Callable[..., Load]:
    """What is measured below a root of its own, by a program that says that it is done."""
    python = program("""echo '{"done": true}'""").python
    sets = ("hardware.count=2", "parallelism.tp=2", "model.target.shape=null", "service.manager=process",
        "host.user=null")  # fmt: skip
    profile = load_profile("rtx-pro-6000-pcie-8x", sets=(*sets, f"host.root={tmp_path}/root")).profile

    def ask(site: Site | None = None, **changes: Any) -> Load:
        request = load_request(profile)
        assert request is not None
        facts = Facts(raw(pcie(2) if site is None else site))
        return load_on({**request, "pythons": [python], **changes}, facts, wanted_of(profile))

    return ask


def test_free_gpus_are_measured_and_those_in_use_are_told(asked: Callable[..., Load]) -> None:
    load = asked()
    assert (load.gpus, load.groups, load.busy) == ((0, 1), ((0, 1),), {})
    assert (load.copying.end, load.reducing.end, load.problem) == ("done", "done", "")
    taken = pcie(2).with_card(1, processes=((4242, "C", "python3", 5000),), used_mib=5004)
    load = asked(taken)
    assert (load.gpus, load.busy) == ((0,), {1: "process 4242 (python3)"})
    assert load.reducing == Run("skipped", said="one GPU has nothing to reduce with")
    disturbing = asked(taken, disruptive=True)
    assert (disturbing.gpus, disturbing.beside, disturbing.record) == ((0, 1), True, "")
    looked = asked(taken, look=True)
    assert (looked.gpus, looked.busy, looked.copying.end) == (
        (0, 1),
        {1: "process 4242 (python3)"},
        "skipped",
    )
    everyone = pcie(2).with_cards(processes=((4242, "C", "python3", 5000),))
    assert asked(everyone).gpus == ()


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"mig": "Enabled"}, "MIG, which splits it"),
        ({"used_mib": 5000}, "a process that is not seen from here, with 5000 MiB"),
        ({"processes": ((1, "G", "Xorg", 90),), "used_mib": 94}, None),
    ],
)
def test_what_keeps_a_gpu_from_being_free(
    asked: Callable[..., Load], changes: dict[str, Any], by: str | None
) -> None:
    load = asked(pcie(2).with_card(1, **changes))
    assert load.busy == ({} if by is None else {1: by})
    assert (1 in load.gpus) == (by is None)


def test_a_split_gpu_is_not_loaded_even_so(asked: Callable[..., Load]) -> None:
    assert asked(pcie(2).with_card(1, mig="Enabled"), disruptive=True).gpus == (0,)


def test_an_interpreter_that_is_not_there_is_told(asked: Callable[..., Load]) -> None:
    load = asked(pythons=["/nowhere/bin/python"])
    assert load.why == "there is no /nowhere/bin/python"
    assert "host.python" in load.fix


def test_nothing_is_measured_while_the_service_is_changed(asked: Callable[..., Load], tmp_path: Path) -> None:
    paths = Layout(tmp_path / "root").service("rtx-pro-6000-pcie-8x")
    paths.base.mkdir(parents=True)
    lock = Lock(paths, "rtx-pro-6000-pcie-8x")
    with lock.hold("swap --set speculative.budget=7"):
        load = asked()
    assert "is locked by" in load.why
    assert "swap --set speculative.budget=7" in load.why
    assert load.copying.end == "skipped"
    assert asked().copying.end == "done"
    assert lock.holder() is None


def test_lines_of_no_sense_are_left_out() -> None:
    copy = {"gpu": 0, "to": 1.5, "back": 2.5, "wrong": 0}
    lines: list[dict[str, Any]] = [
        {"alone": {**copy, "gpu": float("inf")}}, {"alone": {**copy, "to": 10**400}},
        {"alone": copy}, {"alone": {**copy, "to": "nan"}}, {"alone": {**copy, "back": -1}},
        {"alone": {"gpu": 0}}, {"alone": {**copy, "wrong": None}},
        {"peer": {"source": 0, "target": 1, "access": 1, "rate": 2, "wrong": 0}},
        {"smi": "<nonsense"}, {"smi": 7}, {"software": [1]}, {"together": {**copy, "gpu": "x"}},
        {"smi": (OUTPUTS / "h200-smi.xml").read_text(encoding="utf-8")},
    ]  # fmt: skip
    found = read_copies(lines, {"0000:00:06.0": 4})
    assert found["alone"] == (Copy(0, 1.5, 2.5, 0),)
    assert found["peers"] == (Peer(0, 1, False, 2.0, 0),)
    assert found["links"] == (LinkSeen(4, 5, 16),)
    assert (found["together"], found["software"]) == ((), {})
    garbage: list[dict[str, Any]] = [{"reduced": {"gpu": 0, "bytes": 8, "seconds": float("inf"), "wrong": 0}},
        {"ways": {"P2P": 3}, "warned": ["x"]}, {"ways": 3, "warned": None}, {"ways": {"P2P": "x"}},
        {"failed": {"gpu": None}},
        {"ended": {"gpu": 2, "status": 1}}, {"failed": {"gpu": 0}}]  # fmt: skip
    assert read_reduced(garbage) == {
        "software": {}, "reduced": (), "ways": {"P2P": 3}, "warned": ("x",), "faulty": 2,
    }  # fmt: skip


def test_links_are_read_from_the_drivers_account_under_load() -> None:
    rates = copies.at_once([_Fake(), _Fake()], "send", 0.05, lambda: time.sleep(0.2))  # type: ignore[list-item]
    assert all(rate > 0 for rate in rates)
    assert all(fake.after_other > 0 for fake in _Fake.made)


class _Fake:
    """Counts copies; `after_other` how many came once the load had been looked at."""

    made: list[_Fake] = []  # noqa: RUF012
    size, address = 1 << 20, "none"

    def __init__(self) -> None:
        self.begun, self.after_other = time.monotonic(), 0
        _Fake.made.append(self)

    def send(self) -> None:
        time.sleep(0.005)
        self.after_other += time.monotonic() - self.begun > 0.15

    def settle(self) -> None:
        pass


def test_groups_are_the_profiles_own_where_their_gpus_are_free() -> None:
    eight = list(range(8))
    assert groups_of(eight, eight, 8) == ((tuple(eight),), True)
    assert groups_of(eight, eight, 4) == (((0, 1, 2, 3), (4, 5, 6, 7)), True)
    assert groups_of(eight, eight, 1) == ((tuple(eight),), True)
    assert groups_of([0, 1, 2, 3, 5], eight, 4) == (((0, 1, 2, 3),), False)
    assert groups_of([0, 1, 5], eight, 4) == (((0, 1, 5),), False)
    assert groups_of([5], eight, 4) == ((), False)
    assert groups_of([4, 2], [4, 2], 2) == (((4, 2),), True)


def test_the_best_of_earlier_results_on_the_same_gpus_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "load.json"
    gpus = {0: "GPU-a", 1: "GPU-b"}
    for to in (50.0, 55.0, 40.0):
        assert record.remember(path, gpus, Load(alone=(Copy(0, to, 20.0, 0),))) == ""
    assert record.best_of(path, gpus) == {"copy to GPU 0": 55.0, "copy from GPU 0": 20.0}
    assert record.best_of(path, {0: "GPU-a", 1: "GPU-c"}) == {}
    for _ in range(10):
        record.remember(path, gpus, Load(alone=(Copy(0, 41.0, 20.0, 0),)))
    assert record.best_of(path, gpus)["copy to GPU 0"] == 41.0
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(json.loads(path.read_bytes())) == 10


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1, null]", '{"a": 1}', '[{"gpus": {"0": "GPU-a"}, "figures": 3}]']
)
def test_a_damaged_record_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "load.json"
    path.write_text(text, encoding="utf-8")
    assert record.best_of(path, {0: "GPU-a"}) == {}
    assert record.remember(path, {0: "GPU-a"}, Load(alone=(Copy(0, 1.0, 1.0, 0),))) == ""
    assert record.best_of(path, {0: "GPU-a"})["copy to GPU 0"] == 1.0


def test_a_record_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    said = record.remember(tmp_path / "file" / "load.json", {0: "GPU-a"}, Load())
    assert "load.json: " in said
