"""Checkpoints that cannot be served: each fault is found at load and named (corrupt, missing, mismatched)."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ddtree.conftest import Pair, write_json, write_pair
from toolkit.ddtree.engine import Engine
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.types import EngineConfig, Request, SamplingParams

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def pair(tiny_pair, tmp_path):
    """A copy that a test may break."""
    shutil.copytree(tiny_pair.target, tmp_path / "target")
    shutil.copytree(tiny_pair.drafter, tmp_path / "drafter")
    return Pair(tmp_path / "target", tmp_path / "drafter")


def refused(pair, *parts):
    with pytest.raises(CheckpointError) as caught:
        Engine(EngineConfig(pair.target, pair.drafter))
    for part in parts:
        assert str(part) in str(caught.value)


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(directory, **changes):
    path = directory / "config.json"
    write_json(path, {**json.loads(path.read_text()), **changes})


def test_the_copy_itself_loads(pair):
    Engine(EngineConfig(pair.target, pair.drafter))


def test_missing_directory(pair, tmp_path):
    refused(Pair(tmp_path / "nowhere", pair.drafter), tmp_path / "nowhere", "no such checkpoint directory")


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_missing_files(pair, which):
    directory = getattr(pair, which)
    (directory / "model.safetensors").unlink()
    refused(pair, directory, "holds neither model.safetensors nor model.safetensors.index.json")
    (directory / "config.json").unlink()
    refused(pair, directory / "config.json", "no such file")


def test_config_that_is_not_json(pair):
    (pair.target / "config.json").write_text('{"vocab_size": ')
    refused(pair, "config.json", "is not JSON")
    (pair.target / "config.json").write_bytes(b"\xff\xfe{}")
    refused(pair, "config.json", "is not JSON")
    (pair.target / "config.json").write_text("[]")
    refused(pair, "config.json", "is not a JSON object")


@pytest.mark.parametrize("which", ["target", "drafter"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is more than 4096"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings: 1000000000000 is more than"),
        ({"vocab_size": 10**400}, "vocab_size: 1000"),
        ({"rope_theta": 10**400}, "rope_theta: 1000"),
        ({"layer_types": 5}, "layer_types: 5 is not a list"),
        ({"architectures": [{}]}, "architectures: [{}]; this engine serves"),
    ],
)
def test_config_beyond_any_model(pair, which, changes, said):
    """Each is refused by what the file says, before memory is taken for it."""
    edit_config(getattr(pair, which), **changes)
    refused(pair, getattr(pair, which) / "config.json", said)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (os.mkfifo, "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has 1099511627776 bytes"),
        (lambda path: path.write_bytes(b"[" * 200_000), "is nested too deeply"),
        (lambda path: path.write_bytes(b'{"vocab_size": %b}' % (b"9" * 5000)), "is not JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_odd_files_in_place_of_json(pair, name, put, said):
    path = pair.target / name
    path.unlink(missing_ok=True)
    put(path)
    if path.is_file() or name == "config.json":
        refused(pair, path, said)
    else:
        Engine(EngineConfig(pair.target, pair.drafter))  # an index that is no file is none


def test_a_context_beyond_the_models_is_refused_before_its_tables_are_made(pair):
    with pytest.raises(ValueError, match=r"context_length 1000000000000 is outside 2\.\.512"):
        Engine(EngineConfig(pair.target, pair.drafter, context_length=10**12))


@pytest.mark.parametrize("which", ["target", "drafter"])
@pytest.mark.parametrize("size", [0, 6, 500, -1])
def test_truncated_weights(pair, which, size):
    path = getattr(pair, which) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(pair, path, "truncated or corrupt")


def test_corrupt_header(pair):
    path = pair.target / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"x" * 32
    path.write_bytes(content)
    refused(pair, path, "truncated or corrupt")


def test_missing_tensor(pair):
    edit_tensors(pair.target, lambda tensors: tensors.pop(NORM))
    refused(pair, pair.target, "tensors missing", NORM)


def test_unexpected_tensor(pair):
    edit_tensors(pair.drafter, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 2)}))
    refused(pair, pair.drafter, "unexpected tensors", "lm_head.weight")


def test_tensor_of_another_shape(pair):
    edit_tensors(pair.target, lambda tensors: tensors.update({NORM: torch.ones(65)}))
    refused(pair, NORM, "shape [65], config.json calls for [64]")


def test_tensor_of_another_dtype(pair):
    edit_tensors(pair.target, lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}))
    refused(pair, NORM, "torch.int8 is not supported")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensor_that_holds_no_number(pair, value):
    edit_tensors(pair.drafter, lambda tensors: tensors["fc.weight"][3, 5].fill_(value))
    refused(pair, pair.drafter, "fc.weight: holds NaN or infinity")


def test_tied_head_that_differs(pair):
    edit_tensors(pair.target, lambda tensors: tensors.update({"lm_head.weight": torch.ones(272, 64)}))
    refused(pair, "tie_word_embeddings is true, but lm_head.weight differs")


def test_pickles_are_refused(pair):
    (pair.target / "model.safetensors").rename(pair.target / "pytorch_model.bin")
    refused(pair, "pytorch_model.bin", "pickled weights can run code and are refused")


def shard(directory):
    """Split the weights into two files and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return weight_map


def test_shards_load_and_their_faults_are_named(pair):
    weight_map = shard(pair.target)
    Engine(EngineConfig(pair.target, pair.drafter))
    index = pair.target / "model.safetensors.index.json"
    write_json(index, {"weight_map": {**weight_map, "model.norm.weight": "a.safetensors"}})
    refused(pair, "a.safetensors", "lacks tensors that model.safetensors.index.json lists: model.norm.weight")
    write_json(index, {"weight_map": {**weight_map, "model.norm.weight": "../b.safetensors"}})
    refused(pair, index, "'../b.safetensors' is not a safetensors file beside it")
    write_json(index, {"weight_map": {}})
    refused(pair, index, "weight_map: missing or empty")
    write_json(index, {"weight_map": weight_map})
    (pair.target / "b.safetensors").unlink()
    refused(pair, pair.target / "b.safetensors", "no such file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size: 1 is not an integer of at least 2"),
        ({"dflash_config": None}, "dflash_config: missing"),
        ({"dflash_config": {"mask_token_id": 272, "target_layer_ids": [0]}}, "mask_token_id: 272 is outside"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "target_layer_ids: []"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 3]}},
            "its last one is not captured",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 9]}},
            "layer 9 is not one of 0..2",
        ),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, -1]}}, "layer -1 is not one of"),
        ({"num_target_layers": 6}, "num_target_layers is 6, but the target has 4 layers"),
        ({"vocab_size": 320}, "vocab_size is 320, the target's is 272"),
        ({"hidden_size": 128}, "hidden_size is 128, the target's is 64"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
    ],
)
def test_drafters_that_do_not_belong_to_the_target(pair, changes, message):
    edit_config(pair.drafter, **changes)
    refused(pair, pair.drafter / "config.json", message)


def test_padded_vocabulary(tmp_path):
    """E1: rows beyond the tokenizer's tokens are usual and served; a drafter that has others is refused."""
    padded = write_pair(tmp_path / "padded", vocab=320, tokenizer=True)
    engine = Engine(EngineConfig(padded.target, padded.drafter))
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0, logit_bias={300: 1e4}, stop=("never",))
    engine.add(Request("r", (5, 6), sampling))
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == [300] * 6
    assert engine.decode(tokens) == ""
    other = write_pair(tmp_path / "other", vocab=272, tokenizer=True)
    refused(Pair(padded.target, other.drafter), "vocab_size is 272, the target's is 320")


def test_tokenizer_that_does_not_belong_to_the_target(pair):
    path = pair.target / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["more"] = 300
    write_json(path, values)
    refused(pair, path, "has token id 300", "the model's vocabulary is 0..271")
    path.write_text("{}")
    refused(pair, path, "is not a tokenizer")
