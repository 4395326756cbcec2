"""`models` on this machine, as people type it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command, ddtoolkit  # noqa: F401  a fixture
from tests.weights.checkpoints import contents
from tests.weights.server import COMMIT, Publisher
from toolkit.cli.models import _requests

SHARD = "model-00001-of-00003.safetensors"


def test_a_checkpoint_is_added_listed_verified_and_removed(
    ddtoolkit: Command,  # noqa: F811
    server: Publisher,
    tmp_path: Path,
) -> None:
    root = ("--root", str(tmp_path / "root"))
    source = f"{server.url}/folder/"
    added = ddtoolkit("models", "add", source, "--revision", "v1", *root)
    assert added.returncode == 0, added.stderr
    folder = tmp_path / "root" / "models" / "folder@v1"
    assert f"folder@v1 is complete at {folder}" in added.stderr
    assert contents(folder) == contents(server.folder)
    assert (
        "everything is there already" in ddtoolkit("models", "add", source, "--revision", "v1", *root).stderr
    )
    listed = json.loads(ddtoolkit("models", "list", *root, "--json").stdout)["models"]
    assert [(item["model"], item["source"], item["complete"]) for item in listed] == [
        ("folder@v1", f"{source} at v1", True)
    ]
    assert ddtoolkit("models", "verify", *root).returncode == 0
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)
    verified = ddtoolkit("models", "verify", "folder@v1", *root)
    assert (verified.returncode, verified.stdout) == (1, "")
    assert f"{SHARD} is corrupt" in verified.stderr
    assert f"{SHARD} is corrupt" in ddtoolkit("models", "list", *root).stdout
    asked = ddtoolkit("models", "rm", "folder@v1", *root)  # nobody to ask
    assert asked.returncode == 2
    assert "folder@v1 would be removed from this machine (600.4 kB)\n  next: add --yes" in asked.stderr
    assert folder.is_dir()
    assert "is removed, 601." in ddtoolkit("models", "rm", "folder@v1", *root, "--yes").stderr
    assert not folder.exists()


def test_a_branch_is_fetched_at_its_commit(
    ddtoolkit: Command,  # noqa: F811
    server: Publisher,
    tmp_path: Path,
) -> None:
    where = ("--hub", server.url, "--root", str(tmp_path))
    added = ddtoolkit("models", "add", "hf://org/model@main", *where, "--json", "--yes")
    assert f"hf://org/model@main is hf://org/model@{COMMIT}" in added.stderr
    assert set(json.loads(added.stdout)) == {f"org--model@{COMMIT}"}
    assert (tmp_path / "models" / f"org--model@{COMMIT}" / SHARD).is_file()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("models", "add", "hf://org/model"), 2, "needs a revision"),
        (("models", "add", "local-cpu"), 2, "profile local-cpu names no checkpoint that is fetched"),
        (
            ("models", "add", "peer://ct200/x@v1"),
            2,
            "ct200, to fetch checkpoints from, is",
        ),
        (("models", "add", "https://h/x/", "--revision", "v1", "--rate", "7"), 2, "--rate '7' has no unit"),
        (("models", "add", "https://h/x/", "--revision", "v1", "--rate", "7B"), 2, "below 1KiB a second"),
        (("models", "rm", "x@v1", "--yes"), 2, "no model 'x@v1'"),
        (("models", "rm", "x@v1"), 2, "no model 'x@v1'"),
        (("models", "list", "--limit", "x"), 2, "--limit needs an inventory"),
        (("deploy", "profile", "local-cpu", "--seed", "x"), 2, "--seed needs an inventory"),
    ],
)
def test_what_is_wrong_is_told_without_a_traceback(
    ddtoolkit: Command,  # noqa: F811
    tmp_path: Path,
    words: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    root = ("--root", str(tmp_path)) if words[0] == "models" else ()
    done = ddtoolkit(*words, *root)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_overlay_names_other_checkpoints() -> None:
    kimi, _ = _requests("h200-nvlink", None, None, None)
    qwen, name = _requests("h200-nvlink", None, [Path("qwen3-8b")], None)
    assert name == "h200-nvlink"
    assert [item["source"].rpartition("/")[0] for item in (kimi[0], qwen[0])] == [
        "hf://moonshotai",
        "hf://Qwen",
    ]
