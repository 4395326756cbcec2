"""Target and drafter against transformers and the plain reference; rotary scalings; configs."""

import json
import shutil

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.ddtree.conftest import write_json, write_pair
from toolkit.ddtree.model_runner import ModelRunner
from toolkit.ddtree.models.config import RopeConfig, read_drafter_config, read_target_config
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.models.heads import rope_frequencies
from toolkit.ddtree.models.loading import load_drafter_weights, load_target_weights
from toolkit.ddtree.models.reference import drafter_forward, target_forward
from toolkit.ddtree.types import Algorithm, EngineConfig

CPU = torch.device("cpu")
TOKENS = [3, 9, 1, 12, 7, 7, 2, 14, 5, 11, 0, 6, 13]


def runner(pair, **changes):
    return ModelRunner(EngineConfig(pair.target, pair.drafter, **changes))


@pytest.mark.parametrize("tied", [True, False])
def test_target_equals_transformers(tmp_path, tied):
    pair = write_pair(tmp_path, vocab=16, tokenizer=False, tied=tied)
    theirs = Qwen3ForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    models = runner(pair)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS]), output_hidden_states=True)
        hidden, captured = models.append(TOKENS)
        logits = models.target.logits(hidden)
    assert (logits - expected.logits[0]).abs().max() < 1e-4 * expected.logits.abs().max()
    # hidden_states[0] is the embedding, so the output of layer i is hidden_states[i + 1]
    layers = torch.cat([expected.hidden_states[layer + 1][0] for layer in (0, 1, 2)], dim=1)
    assert (captured - layers).abs().max() < 1e-4 * layers.abs().max()


def test_checkpoint_saved_by_transformers_loads(tmp_path):
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()  # sharded
    models = ModelRunner(EngineConfig(tmp_path, algorithm=Algorithm.NONE))
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
        ours = models.target.logits(models.append(TOKENS)[0])
    assert (ours - expected).abs().max() < 1e-5


def test_drafter_equals_reference(lucky_pair):
    models = runner(lucky_pair)
    target_config = read_target_config(lucky_pair.target)
    config = read_drafter_config(lucky_pair.drafter)
    target = load_target_weights(lucky_pair.target, target_config, torch.float32, CPU)
    weights = load_drafter_weights(lucky_pair.drafter, config, torch.float32, CPU)
    with torch.inference_mode():
        models.append(TOKENS[:8])
        models.append(TOKENS[8:], start=8)  # context appended in two pieces
        ours = models.draft(torch.tensor([4]), [len(TOKENS)])[0]
        _, outputs = target_forward(target_config, target, TOKENS)
        expected = drafter_forward(config, weights, target, outputs, bonus=4)
    assert ours.shape == (7, 16)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


def test_bfloat16_stays_near_float32(lucky_pair):
    with torch.inference_mode():
        wide, narrow = (
            models.target.logits(models.append(TOKENS)[0]).float()
            for models in (runner(lucky_pair), runner(lucky_pair, dtype="bfloat16"))
        )
    difference = (wide - narrow).abs().max() / wide.abs().max()
    assert 0 < difference < 0.06


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RopeConfig(5e5), {"rope_type": "default"}),
        (RopeConfig(5e5, "linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeConfig(5e5, "yarn", factor=4.0, original_max_position=512),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        (
            RopeConfig(5e5, "yarn", 8.0, original_max_position=256, beta_fast=16.0, attention_factor=1.5),
            {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256,
                "beta_fast": 16.0, "attention_factor": 1.5,
            },
        ),
    ],
)  # fmt: skip
def test_rope_scalings_equal_transformers(ours, theirs):
    config = Qwen3Config(
        head_dim=64, max_position_embeddings=2048, rope_parameters={"rope_theta": 5e5, **theirs}
    )
    frequencies, scale = rope_frequencies(64, ours)
    if theirs["rope_type"] == "default":
        expected, expected_scale = 5e5 ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        expected, expected_scale = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, CPU)
    assert torch.allclose(frequencies.float(), expected, rtol=1e-5)
    assert scale == pytest.approx(expected_scale)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e6}, RopeConfig(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, RopeConfig(1e6)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(1e6, "linear", 2.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
            RopeConfig(1e6, "yarn", 4.0, original_max_position=512),
        ),
        ({}, RopeConfig(10000.0)),
    ],
)
def test_old_and_new_rope_keys(tiny_pair, tmp_path, keys, expected):
    values = json.loads((tiny_pair.target / "config.json").read_text())
    del values["rope_theta"]
    write_json(tmp_path / "config.json", {**values, **keys})
    assert read_target_config(tmp_path).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: ['LlamaForCausalLM']"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"head_dim": 33}, "head_dim: 33 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not a positive number"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling: 'yarn' is not an object"),
        ({"eos_token_id": 272}, "eos_token_id: 272"),
    ],
)
def test_configs_that_cannot_be_served_name_the_key(tiny_pair, tmp_path, changes, message):
    values = json.loads((tiny_pair.target / "config.json").read_text())
    write_json(tmp_path / "config.json", {**values, **changes})
    with pytest.raises(CheckpointError) as caught:
        read_target_config(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_generation_config_names_the_end_tokens(tiny_pair, tmp_path):
    shutil.copy(tiny_pair.target / "config.json", tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 6]})
    assert read_target_config(tmp_path).eos_token_ids == {5, 6}
