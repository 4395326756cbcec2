"""The hook itself: what it counts, which moments it makes of that, and that it strikes exactly there."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.faults.points import moments

HERE = Path(__file__).parent
WORK = """
import os, shutil, subprocess
from pathlib import Path
place = Path(sys.argv[2])
def write(path, text):
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
write(place / "new", "text")
(place / "new").replace(place / "file")
subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
shutil.rmtree(place / "tree")
fd = os.open(place / "file", os.O_RDWR)
os.pwrite(fd, b"next", 0)
try:
    (place / "tree" / "absent").mkdir()
except FileNotFoundError:
    pass
print("done")
"""


def begin(tmp_path, plan=None, work=WORK):
    """Start a process with the hook that does the work in `tmp_path/place`."""
    for number in range(4):
        (tmp_path / "place" / "tree" / str(number)).mkdir(parents=True)
    head = f"""
        import json, sys
        sys.path.insert(0, {str(HERE)!r})
        import hook
        hook.install("agent", sys.argv[1], json.loads(sys.argv[3]))
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(head) + work,
        tmp_path,
        tmp_path / "place",
        json.dumps(plan),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def counted(tmp_path):
    """The moments of the work."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "counting").touch()
    child = begin(tmp_path / "first")
    out, err = child.communicate(timeout=30)
    assert out == "done\n", err
    return moments((tmp_path / "first" / "trace").read_text().splitlines())


def plan(moment, act):
    """The plan for the work in the second folder."""
    return moment.plan(act) | {"label": moment.label.replace("/first/", "/second/")}


def shown(moment):
    verb, _, rest = moment.label.partition(" ")
    return f"{moment.side} {verb} {Path(rest).name}"


def state(place):
    """What an interrupted process left."""
    return {
        "new": (place / "new").read_text() if (place / "new").exists() else None,
        "file": (place / "file").read_text() if (place / "file").exists() else None,
        "tree": len(list((place / "tree").iterdir())) if (place / "tree").exists() else None,
    }


def test_every_change_has_a_moment_before_and_after_it_and_nothing_else_has(counted):
    assert [shown(moment) for moment in counted] == [
        "before open new",
        "after open new",
        "before fsync new",
        "after replace file",
        "middle rmtree tree",
        "after rmtree tree",
        "after pwrite file",
    ]
    assert "after fsync" in " ".join(counted[2].same_as)
    assert any("run" in name for name in counted[3].same_as), "a program that tells something changes nothing"
    assert any("mkdir" in name for name in counted[6].same_as), "what failed changed nothing"


STATES = [
    {"new": None, "file": None, "tree": 4},
    {"new": "", "file": None, "tree": 4},
    {"new": "text", "file": None, "tree": 4},
    {"new": None, "file": "text", "tree": 4},
    {"new": None, "file": "text", "tree": 3},
    {"new": None, "file": "text", "tree": None},
    {"new": None, "file": "next", "tree": None},
]


@pytest.mark.parametrize("number", range(len(STATES)))
def test_a_process_is_killed_exactly_there(counted, tmp_path, number):
    (tmp_path / "second").mkdir()
    child = begin(tmp_path / "second", plan(counted[number], "kill"))
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (-9, ""), err
    assert state(tmp_path / "second" / "place") == STATES[number]


def test_an_operation_fails_once_with_a_full_disk(counted, tmp_path):
    (tmp_path / "second").mkdir()
    child = begin(tmp_path / "second", plan(counted[0], "enospc"))
    out, err = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "No space left on device" in err
    assert out == ""
    assert state(tmp_path / "second" / "place") == STATES[0]


def test_a_process_waits_until_it_is_told_to_go_on(counted, tmp_path):
    folder = tmp_path / "second"
    folder.mkdir()
    child = begin(folder, plan(counted[3], "hold"))
    end = time.monotonic() + 20
    while not (folder / "reached").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    assert child.poll() is None
    assert state(folder / "place") == STATES[3]
    (folder / "go").touch()
    out, err = child.communicate(timeout=30)
    assert out == "done\n", err


def test_only_one_process_is_struck(counted, tmp_path):
    """An operation that is tried again, or another process of the same role, gets through."""
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "struck").touch()
    child = begin(tmp_path / "second", plan(counted[0], "kill"))
    assert child.communicate(timeout=30)[0] == "done\n"


def test_rows_of_like_operations_count_as_one(tmp_path):
    (tmp_path / "row").mkdir()
    (tmp_path / "row" / "counting").touch()
    work = "from pathlib import Path\nfor n in range(40):\n    Path(sys.argv[2], str(n)).mkdir()\n"
    begin(tmp_path / "row", work=work).communicate(timeout=30)
    found = moments((tmp_path / "row" / "trace").read_text().splitlines())
    assert [shown(moment) for moment in found] == [
        "before mkdir 0", "after mkdir 0", "before mkdir 20",
        "after mkdir 20", "before mkdir 39", "after mkdir 39",
    ]  # fmt: skip
    assert os.listdir(tmp_path / "row" / "place")  # noqa: PTH208
