"""Sizes of checkpoints: those that are known by name, and those read from a folder."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.errors import ToolkitError
from toolkit.profile.memory.shapes import expert_bytes, shape_from_config, shape_of, shapes
from toolkit.profile.memory.weights import stage_layers, weight_bytes

BUNDLED = Path(__file__).parents[3] / "toolkit/ddtree/bundled"
MARK = re.compile(r"(measured|sourced|unverified): \S.*")
KIMI = shapes()["kimi-k2.6-int4"]
INT4 = {"num_bits": 4, "type": "int", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
CONFIG = {
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("shape", shapes().values(), ids=lambda shape: shape.name)
def test_the_parts_add_up_to_the_files(shape):
    # Beside the files lie MLA's copies of kv_b_proj, which SGLang makes.
    copies = shape.layers * shape.heads * shape.kv_rank * (shape.nope_dim + shape.v_dim) * 2
    assert weight_bytes(shape, 1) - copies == pytest.approx(shape.weight_bytes, rel=3e-4)


@pytest.mark.parametrize("shape", shapes().values(), ids=lambda shape: shape.name)
def test_a_shape_says_how_it_is_known(shape):
    assert "config" in shape.sources
    assert all(MARK.fullmatch(source) for source in shape.sources.values())
    assert shape.is_drafter == bool(shape.captured_layers)


def test_the_parts_of_kimi_are_those_of_its_headers():
    """A matrix of an NVFP4 expert: U8 [2048, 3584] and F8_E4M3 [2048, 448] of 2048 x 7168."""
    nvfp4 = shapes()["kimi-k2.6-nvfp4"]
    assert nvfp4.expert_bytes * 2048 * 7168 == 2048 * 3584 + 2048 * 448


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_real_checkpoint_is_measured_by_its_config(role):
    """The bundled pair, float32 in memory and bfloat16 in its files."""
    shape = shape_of(BUNDLED / role)
    files = sum(path.stat().st_size for path in (BUNDLED / role).glob("model*.safetensors"))
    assert shape.is_drafter == (role == "drafter")
    counted = weight_bytes(replace(shape, value_bytes=files_bytes(BUNDLED / role)), 1)
    assert counted == pytest.approx(files, rel=0.02)


def files_bytes(folder):
    """Bytes of a value in the files, by the first header."""
    path = next(folder.glob("model*.safetensors"))
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    kinds = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    assert len(kinds) == 1
    return {"BF16": 2.0, "F16": 2.0, "F32": 4.0}[kinds.pop()]


def test_numbers_of_a_multimodal_model_lie_below_text_config():
    shape = shape_from_config({"vision_config": {}, "text_config": CONFIG}, "x")
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dense_layers) == (4, 8, 8, 4)


@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        ({"config_groups": {"group_0": {"weights": INT4}}}, 0.5625),
        ({"config_groups": {"group_0": {"weights": NVFP4}}}, 0.5625),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "unheard of"}, 2.0),
        ({"config_groups": {"group_0": None}}, 2.0),
    ],
)  # fmt: skip
def test_bytes_of_a_packed_parameter(quantization, size):
    assert expert_bytes(quantization) == pytest.approx(size)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        (json.dumps(CONFIG | {"hidden_size": "wide"}), "hidden_size is missing or no number"),
        (json.dumps(CONFIG | {"kv_lora_rank": 4}), "qk_rope_head_dim is missing or no number"),
        ("{}", "num_attention_heads is missing"),
    ],
)
def test_a_broken_config_is_told(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ToolkitError, match=said) as caught:
        shape_of(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_gpu_holds_its_part():
    whole, eighth = weight_bytes(KIMI, 1), weight_bytes(KIMI, 8)
    routed = 60 * 384 * 3 * 7168 * 2048 * 0.5625
    assert eighth > whole / 8
    assert eighth - whole / 8 < 0.05 * whole  # what lies whole on each is small
    assert eighth > routed / 8


def test_stages_of_a_pipeline():
    assert stage_layers(61, 8) == [7, 7, 7, 8, 8, 8, 8, 8]
    assert weight_bytes(KIMI, 1, 8) > weight_bytes(KIMI, 1) / 8
    # The last stage has one more layer and lm_head, the first the embedding.
    last = weight_bytes(replace(KIMI, vocabulary=1), 1, 8)
    assert weight_bytes(KIMI, 1, 8) - last == pytest.approx(163840 * 7168 * 2, rel=1e-3)


def test_kv_heads_are_copied_where_there_are_fewer_than_gpus():
    drafter = shapes()["kimi-k2.6-dflash"]
    few = replace(drafter, captured_layers=())
    more = weight_bytes(few, 16) - weight_bytes(few, 8) / 2
    assert more == 6 * 7168 * 128 * 2  # half a head of keys and half a head of values a layer


def test_a_tied_embedding_is_counted_once():
    qwen = shapes()["qwen3-8b"]
    table = qwen.vocabulary * qwen.hidden * 2
    assert weight_bytes(qwen, 1) - weight_bytes(replace(qwen, tied=True), 1) == table
    # Stages of their own each need one.
    assert weight_bytes(replace(qwen, tied=True), 1, 2) == weight_bytes(qwen, 1, 2)
