"""`python -m toolkit.ddtree.build`: manifest, caches, and what it refuses."""

import hashlib
import json
import shutil

import pytest

from toolkit.ddtree import build


@pytest.fixture
def arguments(lucky_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_REPEATS", 2)
    shutil.copytree(lucky_pair.target, tmp_path / "target")
    return {
        "--model-path": tmp_path / "target",
        "--speculative-draft-model-path": lucky_pair.drafter,
        "--cache-dir": tmp_path / "cache",
        "--out": tmp_path / "manifest.json",
    }


def run(arguments, capsys, **more):
    listed = [str(word) for pair in arguments.items() for word in pair]
    status = build.main(listed + [str(word) for pair in more.items() for word in pair])
    out, err = capsys.readouterr()
    assert out == ""
    return status, err


def test_manifest_tells_what_was_built(arguments, capsys):
    status, err = run(arguments, capsys)
    assert status == 0
    manifest = json.loads(arguments["--out"].read_text())
    assert set(manifest) == {"versions", "device", "checkpoints", "shapes", "tuned", "seconds"}
    weights = arguments["--model-path"] / "model.safetensors"
    told = manifest["checkpoints"]["target"]["files"]["model.safetensors"]
    assert told == {
        "size": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    files = {"config.json", "model.safetensors", "transition.safetensors"}
    assert set(manifest["checkpoints"]["drafter"]["files"]) == files
    assert manifest["shapes"]["verify_width"] == 17
    assert str(manifest["tuned"]["threads"]) in manifest["tuned"]["milliseconds"]
    assert manifest["device"]["instruction_set"]
    assert "warm-up" in err
    assert "hashing model.safetensors" in err


def test_second_build_takes_hashes_and_tuned_values_from_the_cache(arguments, capsys):
    run(arguments, capsys)
    first = json.loads(arguments["--out"].read_text())
    status, err = run(arguments, capsys)
    second = json.loads(arguments["--out"].read_text())
    assert status == 0
    assert "hashing" not in err
    assert "warm-up" not in err
    assert second["tuned"] == first["tuned"]
    config = arguments["--model-path"] / "config.json"
    config.write_text(config.read_text() + "\n")
    _, err = run(arguments, capsys)
    assert "hashing config.json" in err
    assert "hashing model.safetensors" not in err
    _, err = run(arguments, capsys, **{"--dtype": "bfloat16"})
    assert "warm-up" in err  # another shape


def test_another_budget_takes_the_tuned_values_of_a_cpu(arguments, capsys):
    run(arguments, capsys)
    first = json.loads(arguments["--out"].read_text())
    status, err = run(arguments, capsys, **{"--speculative-ddtree-budget": 20})
    second = json.loads(arguments["--out"].read_text())
    assert status == 0
    assert "warm-up" not in err
    assert (second["tuned"], second["shapes"]["verify_width"]) == (first["tuned"], 21)
    assert build._tuned_shapes(second["shapes"], "cuda") == second["shapes"]


def test_plain_engine_without_drafter_or_cache(arguments, capsys):
    status, _ = run({key: arguments[key] for key in ("--model-path", "--out")}, capsys)
    manifest = json.loads(arguments["--out"].read_text())
    assert status == 0
    assert set(manifest["checkpoints"]) == {"target"}
    assert manifest["shapes"]["verify_width"] == 1


def test_a_cache_that_cannot_be_written_or_read_is_no_error(arguments, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    status, err = run({**arguments, "--cache-dir": tmp_path / "file"}, capsys)
    assert status == 0
    assert "cannot be written" in err
    run(arguments, capsys)
    for path in arguments["--cache-dir"].rglob("*.json"):
        path.write_text("{")
    status, err = run(arguments, capsys)
    assert status == 0
    assert "warm-up" in err


def test_bad_checkpoints_are_refused_in_one_line(arguments, capsys):
    weights = arguments["--model-path"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    status, err = run(arguments, capsys)
    assert status == 2
    assert err.splitlines()[-1].startswith(f"ddtree build: {weights}: truncated or corrupt")
    assert not arguments["--out"].exists()
    assert "Traceback" not in err


def test_arguments_that_do_not_fit_are_refused(arguments, capsys, tiny_pair):
    status, err = run(arguments, capsys, **{"--speculative-ddtree-budget": 3})
    assert status == 2
    assert "tree budget 3 is below 7" in err
    status, err = run(arguments, capsys, **{"--speculative-dflash-block-size": 9})
    assert status == 2
    assert "block size 9 is outside 2..8, the drafter's own" in err
    without = {
        **arguments,
        "--speculative-draft-model-path": tiny_pair.drafter,
        "--model-path": tiny_pair.target,
    }
    status, err = run(without, capsys, **{"--speculative-ddtree-expansion": "transition"})
    assert status == 2
    assert f"the drafter {tiny_pair.drafter} has none" in err
    status, err = run({**arguments, "--out": "/nowhere/manifest.json"}, capsys)
    assert status == 1
    assert "/nowhere/manifest.json: cannot be written" in err
    with pytest.raises(SystemExit, match="2"):
        build.main(["--out", "x"])


def test_cuda_without_a_device_is_refused(arguments, capsys):
    if build.torch.cuda.is_available():
        pytest.skip(reason="this machine has a CUDA device")
    status, err = run(arguments, capsys, **{"--device": "cuda"})
    assert status == 2
    assert "sees no CUDA device; check the driver" in err
