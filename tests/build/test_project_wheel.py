"""The project's own wheel: as its build backend makes it, the same bytes, and enough without an index."""

import base64
import csv
import email
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import toolkit
from tests.hosts import wheelhouse
from toolkit.build import wheelhouse as house
from toolkit.build.project_wheel import file_name, make_wheel

ROOT = Path(__file__).parents[2]
ABOUT = f"ddtoolkit-{toolkit.__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return make_wheel(tmp_path_factory.mktemp("wheel"))


def unpacked(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as packed:
        return {item.filename: packed.read(item) for item in packed.infolist()}


def clean() -> dict[str, str]:
    """An environment in which neither this checkout nor an index is found."""
    left = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    return left | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def test_it_holds_what_the_build_backend_puts_into_one(wheel, tmp_path):
    script = f"from hatchling.build import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    theirs, ours = unpacked(tmp_path / file_name()), unpacked(wheel)
    described = {name for name in theirs | ours if name.startswith(ABOUT)}
    assert {name: ours[name] for name in ours.keys() - described} == {
        name: theirs[name] for name in theirs.keys() - described
    }
    assert theirs.keys() & described == ours.keys() & described
    points = [set(found[f"{ABOUT}/entry_points.txt"].split()) for found in (ours, theirs)]
    assert points[0] == points[1]
    mine, other = (email.message_from_bytes(found[f"{ABOUT}/METADATA"]) for found in (ours, theirs))
    assert mine.get_payload() == other.get_payload()
    assert set(mine) == set(other)
    # Which version of the format is written is each one's own business.
    for field in set(mine) - {"Requires-Dist", "Metadata-Version"}:
        assert mine.get_all(field) == other.get_all(field)
    needs = [
        {str(Requirement(item)).lower() for item in found.get_all("Requires-Dist")} for found in (mine, other)
    ]
    assert needs[0] == needs[1]


def test_its_record_has_the_hash_and_size_of_every_file(wheel):
    content = unpacked(wheel)
    rows = list(csv.reader(content[f"{ABOUT}/RECORD"].decode().splitlines()))
    assert [row[0] for row in rows] == list(content)
    for name, digest, size in rows[:-1]:
        found = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={found}", len(content[name]))
    assert rows[-1] == [f"{ABOUT}/RECORD", "", ""]


def test_a_checkout_and_what_it_was_installed_from_give_the_same_bytes(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    before = os.umask(0o077)
    try:
        script = "import pathlib, sys; from toolkit.build.project_wheel import make_wheel, _PACKAGE; "
        script += "assert str(_PACKAGE).startswith(sys.argv[1]); make_wheel(pathlib.Path(sys.argv[1]))"
        subprocess.run(
            [sys.executable, "-c", script, tmp_path],
            cwd="/",
            env=clean() | {"PYTHONPATH": str(site)},
            check=True,
        )
    finally:
        os.umask(before)
    assert (tmp_path / file_name()).read_bytes() == wheel.read_bytes()


def test_what_is_neither_makes_none_and_says_so(tmp_path):
    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit", ignore=shutil.ignore_patterns("bundled", "__py*"))
    script = (
        "import pathlib; from toolkit.build.project_wheel import make_wheel; make_wheel(pathlib.Path('.'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "it is neither a checkout nor installed from a wheel" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.timeout(480)
def test_a_machine_without_an_index_installs_it_from_the_folder(tmp_path):
    if (reason := wheelhouse.why_not()) is not None:
        pytest.skip(reason)
    folder = wheelhouse.filled()
    assert house.verify(folder) == []
    place = tmp_path / "venv"
    # The pip of this environment works on the other one: making one of its own takes seconds.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, env=clean())

    def ran(*words: str | Path) -> str:
        done = subprocess.run(words, cwd="/", env=clean(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-I", "-m", "pip", "--python", place / "bin" / "python", "install")
    pip += ("--no-index", "--find-links", folder)
    ran(*pip, "--no-compile", "ddtoolkit")
    program = place / "bin" / "ddtoolkit"
    assert toolkit.__version__ in ran(program, "--version")
    assert "local-cpu" in ran(program, "profiles", "list")
    ran(program, "validate", "local-cpu")
    # The lock that lies there names every file with its hash, this wheel's too.
    locked = ran(*pip, "--dry-run", "--ignore-installed", "--require-hashes", "-r", folder / "control.txt")
    assert f"ddtoolkit-{toolkit.__version__}" in locked.splitlines()[-1]
