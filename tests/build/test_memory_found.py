"""Checkpoints on a host against the profile: sparse files of the right sizes stand for 595 GB."""

import json

import pytest

from tests.sglang.checkpoints import KIMI_DFLASH, KIMI_INT4, QWEN3, QWEN3_DFLASH
from toolkit.build.memory_found import check_checkpoints
from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.loading import load_profile
from toolkit.profile.memory.shapes import shapes


def checkpoint(folder, config, size):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)  # a hole
    return folder


@pytest.fixture
def kimi(tmp_path):
    target = checkpoint(tmp_path / "target", KIMI_INT4, shapes()["kimi-k2.6-int4"].weight_bytes)
    drafter = checkpoint(tmp_path / "drafter", KIMI_DFLASH, shapes()["kimi-k2.6-dflash"].weight_bytes)
    return target, drafter


def told(folders, *sets, name="rtx-pro-6000-pcie-8x", overlays=()):
    profile = load_profile(name, overlays=overlays, sets=sets).profile
    places = [
        f"model.{role}.source={folder}" for role, folder in zip(("target", "drafter"), folders, strict=True)
    ]
    on_host = load_profile(name, overlays=overlays, sets=[*sets, "model.target.revision=x", *places]).profile
    return list(check_checkpoints(profile, on_host))


def test_kimi_as_it_was_said_to_be(kimi):
    """The vision tower is what config.json does not tell of: the sum is that of the known shape."""
    assert told(kimi) == ["memory: 91.8 of 94.6 GiB of each GPU by the checkpoints' config.json"]


def test_without_shapes_the_checkpoints_own_numbers_count(kimi):
    sets = ("model.target.shape=null", "model.drafter.shape=null", "engine.memory_fraction=0.8")
    with pytest.raises(ConfigError) as caught:
        told(kimi, *sets)
    assert "= 82.7 GiB on a GPU of tp 8" in str(caught.value)
    assert caught.value.problems[0].key == "engine.memory_fraction"


def test_another_model_than_was_named(kimi, tmp_path):
    qwen = checkpoint(tmp_path / "qwen", QWEN3, 16381000000)
    with pytest.raises(
        ToolkitError, match=r"qwen/config\.json: attention is MHA, and kimi-k2.6-int4 has MLA"
    ):
        told((qwen, kimi[1]))
    other = KIMI_DFLASH | {"dflash_config": {"target_layer_ids": [2, 13, 25, 36, 48, 59]}}
    shifted = checkpoint(tmp_path / "shifted", other, 6958000000)
    with pytest.raises(
        ToolkitError, match=r"captured_layers is \(2, 13, .* and kimi-k2.6-dflash has \(1, 12"
    ):
        told((kimi[0], shifted))


def test_a_drafter_of_another_target(kimi, tmp_path):
    drafter = checkpoint(tmp_path / "qwen-drafter", QWEN3_DFLASH, 2097000000)
    sets = ("model.drafter.shape=null", "speculative.block_size=16")
    with pytest.raises(ConfigError, match="reads hidden states of 4096"):
        told((kimi[0], drafter), *sets)


def test_files_that_config_does_not_explain_are_told(kimi, tmp_path):
    large = checkpoint(tmp_path / "large", KIMI_INT4, 1_000_000_000_000)
    (line,) = told((large, kimi[1]))
    assert "931.3 GiB, of which its config.json explains 554" in line
    assert line.endswith("memory is not judged")


def test_plain_decoding_needs_no_drafter_there(kimi, tmp_path):
    assert told((kimi[0], tmp_path / "absent"), overlays=["plain"])
    with pytest.raises(ToolkitError, match=r"absent/config\.json: cannot be read"):
        told((kimi[0], tmp_path / "absent"))


def test_the_embedded_engine_has_its_own_checks(tmp_path):
    profile = load_profile("local-cpu").profile
    assert list(check_checkpoints(profile, profile)) == []
