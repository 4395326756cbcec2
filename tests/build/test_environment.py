"""Engine environments: content-addressed, immutable, never half-made."""

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import toolkit
from toolkit.build.environment import (
    Environment,
    damage,
    environment_under,
    locked_environment,
    materialise,
)
from toolkit.build.lock import Lock
from toolkit.errors import ToolkitError


def test_the_environment_runs_its_own_copy_of_the_code(tmp_path: Path) -> None:
    home = materialise(environment_under(), tmp_path)
    script = "import toolkit; print(toolkit.__file__)"
    command = [sys.executable, "-c", script]
    shown = subprocess.run(
        command,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == str(home / "toolkit" / "__init__.py")


def test_its_entry_points_are_those_of_the_project(tmp_path: Path) -> None:
    home = materialise(environment_under(), tmp_path)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    script = (
        "import json; from importlib.metadata import distribution as d; found = d('ddtoolkit'); "
        "print(json.dumps([str(found.locate_file('')), found.version, "
        "{point.name: point.value for point in found.entry_points}]))"
    )
    shown = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | {"PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = project["entry-points"]["sglang.srt.plugins"]
    assert json.loads(shown.stdout) == [str(home), toolkit.__version__, wanted]


def test_the_same_environment_is_made_once(tmp_path: Path) -> None:
    environment = environment_under()
    home = materialise(environment, tmp_path)
    inode = (home / "environment.json").stat().st_ino
    assert materialise(environment, tmp_path) == home
    assert (home / "environment.json").stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == [environment.digest]


def test_every_user_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        home = materialise(environment_under(), tmp_path)
    finally:
        os.umask(before)
    closed = [path for path in (home, *home.rglob("*")) if not path.stat().st_mode & stat.S_IROTH]
    assert closed == []


def test_versions_are_those_of_the_interpreter_that_is_named(tmp_path: Path) -> None:
    named = tmp_path / "python"
    named.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    named.chmod(0o755)
    found = environment_under(str(named))
    assert (found.python, found.versions) == (named, environment_under().versions)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("#!/bin/sh\nexit 3\n", "does not run as a Python interpreter"),
        ("#!/bin/sh\necho '{}'\n", "needs torch, tokenizers"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    named = tmp_path / "python"
    if text is not None:
        named.write_text(text)
        named.chmod(0o755)
    with pytest.raises(ToolkitError, match=said) as caught:
        environment_under(str(named))
    assert str(named) in caught.value.message


@pytest.mark.parametrize("marker", [None, "", '{"python": ', "[]"])
def test_one_without_a_whole_marker_is_made_again(tmp_path: Path, marker: str | None) -> None:
    environment = environment_under()
    home = materialise(environment, tmp_path)
    (home / "environment.json").unlink()
    if marker is not None:
        (home / "environment.json").write_text(marker)
    assert damage(home) is not None
    shutil.rmtree(home / "toolkit" / "profile")
    assert materialise(environment, tmp_path) == home
    assert (home / "toolkit" / "profile" / "schema.py").is_file()
    assert damage(home) is None


def test_digest_and_differences_follow_versions_and_code() -> None:
    old = Environment(Path("/usr/bin/python3"), {"python": "3.11.2", "torch": "2.11.0"}, "aa")
    new = Environment(
        Path("/usr/bin/python3"), {"python": "3.11.2", "torch": "2.13.0", "triton": "3.6"}, "bb"
    )
    assert old.digest != new.digest
    assert new.differences(built(old)) == [
        "torch 2.11.0 -> 2.13.0",
        "triton none -> 3.6",
        "the toolkit's own code changed",
    ]
    assert new.differences(built(new)) == []
    other = dataclasses.replace(new, python=Path("/opt/python3"))
    assert other.differences(built(new)) == ["another interpreter: /opt/python3"]


def built(environment: Environment) -> dict[str, object]:
    """As a release's manifest tells of it."""
    return {
        "python": str(environment.python),
        "versions": environment.versions,
        "source": environment.source,
        "lock": environment.lock,
    }


LOCK = Lock(
    "embedded",
    "torch==2.13.0 \\\n    --hash=sha256:aa\ntriton==3.9.0 \\\n    --hash=sha256:bb\n"
    "numpy==2.2.6 ; python_version < '3.12' \\\n    --hash=sha256:cc\n"
    "numpy==2.3.5 ; python_version >= '3.12' \\\n    --hash=sha256:dd\n",
)
INSTALLED = {"python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.2.6", "uvicorn": "0.54.0"}


def test_what_is_not_installed_yet_differs_by_what_its_lock_says(tmp_path: Path) -> None:
    now = locked_environment(LOCK, tmp_path)
    before = built(now) | {"versions": INSTALLED}
    # The same lock: exactly that is installed again.
    assert now.differences(before) == []
    # Another one: its Python is not known yet, nor whether this torch asks for CUDA's libraries.
    before["lock"] = "of another lock"
    assert now.differences(before) == ["uvicorn 0.54.0 -> none"]
    before["versions"] = {**INSTALLED, "torch": "2.11.0+cpu", "numpy": "1.26.4", "triton": "3.6.0"}
    assert now.differences(before) == [
        "numpy 1.26.4 -> 2.3.5",
        "torch 2.11.0+cpu -> 2.13.0",
        "triton 3.6.0 -> 3.9.0",
        "uvicorn 0.54.0 -> none",
    ]
    before["versions"] = {key: INSTALLED[key] for key in ("python", "torch", "numpy")}
    before["python"] = "/opt/ddtoolkit/envs/lib-of-another-lock/bin/python"
    assert now.differences(before) == [f"libraries of another lock: {tmp_path / LOCK.folder_name}"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(reason="mounting a small file system needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        with pytest.raises(
            ToolkitError, match=r"cannot make the environment \S+: (\[Errno 28\] )?No space[^(]*$"
        ):
            materialise(environment_under(), small)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
