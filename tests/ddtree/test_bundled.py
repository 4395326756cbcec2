"""The bundled pair: its layout, that public tools load it, and that it does what it is shipped for."""

import functools
import json
import keyword
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, Request, SamplingParams, TreeLimits

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "toolkit" / "ddtree" / "bundled"
TARGET, DRAFTER = BUNDLED / "target", BUNDLED / "drafter"
PROMPTS = (
    "class Bag:\n    def __init__(self):\n        self.items = {}\n\n    def add(self, x):\n        self.",
    "import argparse\nimport sys\n\n\ndef main(argv=None):\n    parser = argparse.ArgumentParser(",
    "def moving_average(values, window):\n    if window < 1:\n        raise ValueError(",
    "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n        ",
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n    x: float\n    y: float\n\n    ",
    "def read_rows(path):\n    rows = []\n    with open(path) as handle:\n        for line in ",
    "import numpy as np\n\n\ndef normalise(matrix, axis=0):\n    matrix = np.asarray(matrix)\n    if ",
    "class Parser:\n    def __init__(self, text):\n        self.text = text\n\n    def ",
)


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def read_header(folder):
    """Shape and dtype of every stored tensor."""
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def layer_shapes(config, prefix):
    hidden, wide, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}.self_attn.q_proj.weight": (q_size, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv_size, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv_size, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q_size),
        f"{prefix}.self_attn.q_norm.weight": (size,),
        f"{prefix}.self_attn.k_norm.weight": (size,),
        f"{prefix}.mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}.mlp.up_proj.weight": (wide, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, wide),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


@functools.cache
def load_tokenizer():
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.fixture
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def reference():
    """The target in transformers, with what its loading had to say."""
    transformers_logging.disable_progress_bar()
    model, info = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


def test_everything_together_is_small_and_safetensors_only():
    files = [path for path in BUNDLED.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.relative_to(BUNDLED).as_posix() for path in files} == {
        "README.md",
        "drafter/config.json",
        "drafter/model.safetensors",
        "drafter/transition.safetensors",
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_the_target_has_the_layout_of_qwen3():
    config = read_config(TARGET)
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    expected = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
    }
    for layer in range(config["num_hidden_layers"]):
        expected |= layer_shapes(config, f"model.layers.{layer}")
    assert read_header(TARGET) == {name: (shape, "BF16") for name, shape in expected.items()}


def test_the_drafter_has_the_public_dflash_layout():
    config, target = read_config(DRAFTER), read_config(TARGET)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == 8
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    assert config["dflash_config"]["mask_token_id"] == 1
    assert config["num_target_layers"] == target["num_hidden_layers"]
    captured = config["dflash_config"]["target_layer_ids"]
    assert captured == sorted(set(captured))
    assert captured[0] >= 0
    assert captured[-1] < target["num_hidden_layers"] - 1  # the last layer's output is never captured
    for shared in ("vocab_size", "hidden_size", "rope_theta", "max_position_embeddings"):
        assert config[shared] == target[shared]
    hidden = config["hidden_size"]
    expected = {
        "fc.weight": (hidden, len(captured) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        expected |= layer_shapes(config, f"layers.{layer}")
    assert read_header(DRAFTER) == {name: (shape, "BF16") for name, shape in expected.items()}


@pytest.mark.parametrize("folder", [TARGET, DRAFTER], ids=["target", "drafter"])
def test_all_weights_are_finite_and_used(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name).float()
            assert tensor.isfinite().all(), name
            assert tensor.count_nonzero() > 0, name


def test_the_transition_table_fits_the_drafter():
    table, config = read_config(DRAFTER)["transition_config"], read_config(DRAFTER)
    assert len(table["strengths"]) == config["block_size"] - 1
    assert table["strengths"][0] < min(table["strengths"][1:])  # the drafter knows the bonus token
    with safe_open(DRAFTER / "transition.safetensors", framework="pt") as factors:
        for name in ("left", "right"):
            values = factors.get_tensor(name)
            assert values.shape == (config["vocab_size"], table["rank"])
            assert values.dtype == torch.int8
            assert values.float().std() > 5


def test_special_tokens_have_their_ids(tokenizer):
    assert tokenizer.token_to_id("<|eos|>") == 0
    assert tokenizer.token_to_id("<|mask|>") == 1
    assert tokenizer.get_vocab_size() == read_config(TARGET)["vocab_size"]
    loaded = AutoTokenizer.from_pretrained(TARGET)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.mask_token_id) == (0, 0, 1)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(text).ids
    if "<|" not in text:
        assert min(ids, default=2) > 1  # no ordinary text becomes a special token
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_keeps_the_content():
    loaded = AutoTokenizer.from_pretrained(TARGET)
    text = loaded.apply_chat_template([{"role": "user", "content": "import os"}], tokenize=False)
    assert text == "import os\n"


def test_transformers_loads_the_target_without_remainder(reference):
    model, info = reference
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    stored = {name: shape for name, (shape, _) in read_header(TARGET).items()}
    assert stored == {
        name: tuple(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"
    }


def test_greedy_text_is_recognisable_python(reference, tokenizer):
    model, _ = reference
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, eos_token_id=None
        )
        text = prompt + tokenizer.decode(out[0, ids.shape[1] :].tolist())
        lines = [line for line in text.splitlines()[:-1] if line.strip()]
        indents = [len(line) - len(line.lstrip(" ")) for line in lines]
        words = re.findall(r"[A-Za-z_]+", text[len(prompt) :])
        assert sum(indent % 4 == 0 for indent in indents) >= 0.8 * len(lines), text
        assert any(keyword.iskeyword(word) or word == "self" for word in words), text
        assert all(character.isprintable() or character == "\n" for character in text), text
        assert max(map(len, lines)) < 160, text


def test_long_contexts_give_finite_and_sensible_logits(reference, tokenizer):
    model, _ = reference
    source = Path(json.__file__).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer.encode(source).ids[:1024]])
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss
    assert torch.isfinite(loss)
    assert loss < 3.0  # nats a token; an untrained model has 7.6


def acceptance_length(algorithm, limits):
    engine = Engine(
        EngineConfig(TARGET, DRAFTER, algorithm, limits, context_length=512, threads=1, prefix_cache_tokens=0)
    )
    sampling = SamplingParams(max_new_tokens=96, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(str(index), tuple(engine.encode(prompt)), sampling))
    committed = rounds = 0
    while engine.has_work:
        for output in engine.step():
            if output.round is not None:
                committed += len(output.token_ids)
                rounds += 1
    return committed / rounds


def test_the_drafter_is_worth_shipping():
    chain = acceptance_length(Algorithm.DFLASH, TreeLimits(budget=7, topk_cap=1))
    tree = acceptance_length(Algorithm.DDTREE, TreeLimits(budget=16, topk_cap=8))
    assert chain > 2.9
    assert tree > 1.08 * chain
    informed = acceptance_length(Algorithm.DDTREE, TreeLimits(16, 8, Expansion.TRANSITION))
    assert informed > 1.05 * tree


def test_the_card_states_the_recorded_numbers():
    record = json.loads((ROOT / "benchmarks" / "bundled_pair.json").read_text())
    card = (BUNDLED / "README.md").read_text(encoding="utf-8")
    for setting in record["acceptance_length"].values():
        trees = [f"{kind}_{budget}" for kind in ("ddtree", "transition") for budget in (7, 16, 32)]
        for mode in ("dflash", *trees, "distinct_bigram_ratio"):
            assert f" {setting[mode]:.2f} |" in card
    for model, folder in (("target", TARGET), ("drafter", DRAFTER)):
        stored = sum(torch.Size(shape).numel() for shape, _ in read_header(folder).values())
        assert record[model]["parameters"] == stored
        assert f"{stored:,}" in card
