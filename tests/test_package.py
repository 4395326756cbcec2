"""The wheel: everything that the command needs comes with it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    script = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, script: str) -> str:
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[1:1] = {sys.path[1:]!r}; {script}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    shown = subprocess.run(
        command,
        cwd=installed,
        env=environment | {"PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    )
    return shown.stdout.strip()


def test_profiles_are_found_in_the_wheel(installed: Path) -> None:
    script = (
        "from toolkit.profile.loading import load_profile; print(load_profile('local-cpu').sources[0].path)"
    )
    assert run(installed, script) == str(installed / "toolkit" / "_data" / "profiles" / "local-cpu.yaml")


def test_playbooks_are_found_in_the_wheel(installed: Path) -> None:
    folder = Path(run(installed, "from toolkit.resources import bundled; print(bundled('playbooks'))"))
    assert folder == installed / "toolkit" / "_data" / "playbooks"
    assert (folder / "roles" / "base" / "tasks" / "main.yml").is_file()


def test_a_checkout_uses_its_own(installed: Path) -> None:
    from toolkit.resources import bundled

    assert bundled("profiles") == ROOT / "profiles"


def test_the_bundled_pair_comes_along(installed: Path) -> None:
    for part in ("target", "drafter"):
        assert (
            installed / "toolkit" / "ddtree" / "bundled" / part / "model.safetensors"
        ).stat().st_size > 1e6
