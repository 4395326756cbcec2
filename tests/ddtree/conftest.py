"""Small checkpoints for the engine's tests, written in the layouts that real ones have."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.models.config import read_drafter_config, read_target_config
from toolkit.ddtree.models.loading import drafter_shapes, target_shapes
from toolkit.ddtree.types import (
    Algorithm,
    EngineConfig,
    FinishReason,
    Output,
    Request,
    RoundStats,
    SamplingParams,
    TreeLimits,
)

torch.set_num_threads(1)


@dataclass(frozen=True)
class Pair:
    """Directories of a target and its drafter."""

    target: Path
    drafter: Path


def write_pair(
    root: Path, *, vocab: int, tokenizer: bool, tied: bool = True, seed: int = 0, **changes
) -> Pair:
    """Write a random target (4 layers) and drafter (block 8); `changes` go into both configs."""
    shape = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "eos_token_id": 0,
        **changes,
    }
    target, drafter = root / "target", root / "drafter"
    for directory in (target, drafter):
        directory.mkdir(parents=True)
    write_json(
        target / "config.json",
        {
            **shape,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "tie_word_embeddings": tied,
        },
    )
    write_json(
        drafter / "config.json",
        {
            **shape,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 1,
            "num_target_layers": 4,
            "block_size": 8,
            "dflash_config": {"target_layer_ids": [0, 1, 2], "mask_token_id": 1},
        },
    )
    generator = torch.Generator().manual_seed(seed)
    save_file(
        random_tensors(target_shapes(read_target_config(target)), generator), target / "model.safetensors"
    )
    save_file(
        random_tensors(drafter_shapes(read_drafter_config(drafter)), generator), drafter / "model.safetensors"
    )
    if tokenizer:
        write_tokenizer(target / "tokenizer.json")
    return Pair(target, drafter)


def write_transition(drafter: Path, vocab: int, seed: int = 0) -> None:
    """Add a random transition table to a drafter of block 8."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in ("left", "right"):
        tensors[name] = torch.randint(-127, 128, (vocab, 4), generator=generator).to(torch.int8)
        tensors[f"{name}_scale"] = (torch.rand(vocab, generator=generator) * 0.02).half()
    save_file(tensors, drafter / "transition.safetensors")
    config = json.loads((drafter / "config.json").read_text())
    config["transition_config"] = {"rank": 4, "strengths": [0.2, *[1.0] * 6]}
    write_json(drafter / "config.json", config)


def random_tensors(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights large enough that logits are far from equal; norms near one."""
    return {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_tokenizer(path: Path) -> None:
    """Byte-level tokenizer: <|eos|> 0, <|mask|> 1, the 256 bytes, and a few longer tokens."""
    vocabulary = {"<|eos|>": 0, "<|mask|>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    merges = [
        ("i", "n"),
        ("Ġ", "t"),
        ("e", "r"),
        ("d", "e"),
        ("de", "f"),
        ("s", "e"),
        ("se", "l"),
        ("sel", "f"),
    ]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|mask|>"])
    tokenizer.save(str(path))


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> Pair:
    """A random pair with a byte-level tokenizer; its drafts are hardly ever accepted."""
    return write_pair(tmp_path_factory.mktemp("tiny"), vocab=272, tokenizer=True)


@pytest.fixture(scope="session")
def lucky_pair(tmp_path_factory) -> Pair:
    """A random pair of so few tokens that wide trees often hold the target's path; untied head, a table."""
    pair = write_pair(tmp_path_factory.mktemp("lucky"), vocab=16, tokenizer=False, tied=False, seed=1)
    write_transition(pair.drafter, 16)
    return pair


BUNDLED = Pair(
    Path(__file__).parents[2] / "toolkit/ddtree/bundled/target",
    Path(__file__).parents[2] / "toolkit/ddtree/bundled/drafter",
)


@dataclass
class Result:
    """What an engine gave one request in all."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    matched: int | str | None = None
    cached: int = 0
    rounds: list[RoundStats] = field(default_factory=list)

    @property
    def told(self):
        """Everything that must not depend on how it was decoded."""
        return self.tokens, self.finish, self.matched


def build_engine(pair: Pair, algorithm: Algorithm = Algorithm.DDTREE, **changes) -> Engine:
    changes.setdefault("prefix_cache_tokens", 0)
    return Engine(EngineConfig(pair.target, pair.drafter, algorithm=algorithm, **changes))


def request(rid: str, prompt, limits: TreeLimits | None = None, extra_key: str = "", **sampling) -> Request:
    """A greedy request that ignores the end token, unless told otherwise."""
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(rid, tuple(prompt), SamplingParams(**params), limits, extra_key)


def collect(results: dict[str, Result], outputs: list[Output]) -> None:
    for output in outputs:
        result = results.setdefault(output.rid, Result())
        assert result.finish is None, f"{output.rid} went on after its end"
        result.tokens += output.token_ids
        result.finish, result.matched, result.cached = output.finish, output.matched, output.cached_tokens
        if output.round is not None:
            result.rounds.append(output.round)


def generate(engine: Engine, *requests: Request) -> dict[str, Result]:
    """Add all requests at once and run the engine until it has nothing to do."""
    results: dict[str, Result] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        collect(results, engine.step())
    return results
