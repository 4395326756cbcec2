"""The SGLang engine's build, from an environment as a release has it, with SGLang's own parser."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.conftest import BUNDLED
from toolkit.build.environment import environment_under, materialise

pytestmark = pytest.mark.timeout(300)
FLAGS = [
    "--model-path", f"{BUNDLED}/target", "--device", "cpu", "--dtype", "float32",
    "--attention-backend", "triton", "--sampling-backend", "pytorch",
    "--skip-tokenizer-init", "--disable-overlap-schedule",
]  # fmt: skip
TREE = ["--speculative-draft-model-path", f"{BUNDLED}/drafter", "--speculative-algorithm", "DDTREE"]


@pytest.fixture(scope="module")
def home(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = environment_under(str(sglang_python), "sglang")
    assert environment.versions["sglang"] == "0.5.17"
    return materialise(environment, tmp_path_factory.mktemp("environments"))


def build(home: Path, python: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("build_on_cpu.py")
    command = [python, "-P", program, "--device", "cpu", "--out", out, "--", *flags]
    environment = os.environ | {"PYTHONPATH": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)


def test_the_manifest_tells_versions_and_hashes(home: Path, sglang_python: Path, tmp_path: Path) -> None:
    done = build(
        home, sglang_python, tmp_path / "out.json", *FLAGS, *TREE, "--speculative-ddtree-budget", "16"
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out.json").read_text())
    assert manifest["versions"]["sglang"] == "0.5.17"
    assert set(manifest["checkpoints"]) == {"target", "drafter"}
    assert manifest["checkpoints"]["target"]["files"]["model.safetensors"]["sha256"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*FLAGS, *TREE, "--speculative-ddtree-budget", "3"], "tree budget 3 is below 7"),
        ([*FLAGS, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--model-path", "/absent"], "/absent/config.json: No such file or directory"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    home: Path, sglang_python: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    done = build(home, sglang_python, tmp_path / "out.json", *flags)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ddtree build: ")
    assert said in last
    assert not (tmp_path / "out.json").exists()


def test_a_shard_that_is_missing_is_named(home: Path, sglang_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "one.safetensors").touch()
    done = build(home, sglang_python, tmp_path / "out.json", "--model-path", str(folder))
    assert done.stderr.splitlines()[-1].endswith("1 of 2 files are missing, first two.safetensors")
