"""Reads `config.json` of a Qwen3-architecture target and of a DFlash drafter.

Both layouts of the rotary settings are read: `rope_theta` with `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5). What this engine does not compute (sliding windows, biases, other
activations, unknown rotary scalings) is refused with its key rather than ignored.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.ddtree.models.errors import CheckpointError

CONFIG_NAME = "config.json"
TARGET_ARCHITECTURES = ("Qwen3ForCausalLM",)
DRAFTER_ARCHITECTURES = ("DFlashDraftModel",)
_ROPE_TYPES = ("default", "linear", "yarn")
# Far beyond any model: what is larger is an error, and would take the memory of the machine to refuse later.
_LARGEST = 1 << 24
_MOST_LAYERS = 1 << 12
_LONGEST_FILE = 64 << 20
_GREATEST = sys.float_info.max
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear" (positions divided by `factor`) or "yarn" (arXiv 2309.00071).
        factor: context extension factor; 1 for "default".
        original_max_position: context length before the extension ("yarn").
        beta_fast: rotations above which a dimension is left alone ("yarn").
        beta_slow: rotations below which a dimension is fully interpolated ("yarn").
        attention_factor: scale of cos and sin; None derives it from `factor` ("yarn").
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Qwen3-style decoder: grouped-query attention with per-head RMS norms, SwiGLU MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class TransitionConfig:
    """A drafter's transition table, `transition_config` in its config.

    Attributes:
        rank: length of its factors.
        strengths: how much it counts in each drafted slot.
    """

    rank: int
    strengths: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DFlash drafter's config (z-lab's public layout).

    Attributes:
        model: shape of the drafter's own layers.
        block_size: slots of a draft block, the bonus token's included.
        mask_token_id: the token that fills the slots to draft.
        target_layer_ids: target layers whose outputs condition the drafter, counted from 0.
        num_target_layers: layers of the target it was trained for, or None where the file does not say.
        transition: its transition table, or None if it has none.
    """

    model: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    transition: TransitionConfig | None = None


class _Keys:
    """Typed access to one JSON object, with errors that name file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(self.path, f"{self.prefix}{key}: {problem}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = _LARGEST) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing; an integer is needed")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fail(key, f"{value!r} is not an integer of at least {low}")
        if value > high:
            raise self.fail(key, f"{_shown(value)} is more than {high}, which no model has")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing; a positive number is needed")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _GREATEST:
            raise self.fail(key, f"{_shown(value)} is not a positive number")
        return float(value)

    def section(self, key: str) -> _Keys | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"{value!r} is not an object")
        return _Keys(self.path, value, f"{self.prefix}{key}.")


def _shown(value: object) -> str:
    """A value for a message: a number may have thousands of digits."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        found = path.stat()
        # A pipe would be waited for, and a device may have no end.
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(path, "is no regular file")
        if found.st_size > _LONGEST_FILE:
            raise CheckpointError(path, f"has {found.st_size} bytes; more than {_LONGEST_FILE} are not read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(path, "no such file; is this a Hugging Face checkpoint directory?") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(path, "is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(path, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value


def read_target_config(directory: Path) -> ModelConfig:
    """Read the target's config.

    Raises:
        CheckpointError: the directory or file is missing, a key is wrong, or the architecture is another.
    """
    keys = _open(directory, TARGET_ARCHITECTURES)
    return _model(keys, _eos_ids(keys, directory))


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Read the drafter's config.

    Raises:
        CheckpointError: as `read_target_config`; also a block of fewer than two slots, a mask token outside
            the vocabulary, no target layers, or a transition table that does not fit the block.
    """
    keys = _open(directory, DRAFTER_ARCHITECTURES)
    model = _model(keys, frozenset())
    block_size = keys.integer("block_size", low=2)
    inner = keys.section("dflash_config")
    if inner is None:
        raise keys.fail("dflash_config", "missing; target_layer_ids and mask_token_id are needed")
    mask = inner.integer("mask_token_id", low=0)
    if mask >= model.vocab_size:
        raise inner.fail("mask_token_id", f"{mask} is outside the vocabulary of {model.vocab_size} tokens")
    layers = inner.values.get("target_layer_ids")
    if (
        not isinstance(layers, list)
        or not layers
        or not all(isinstance(x, int) and not isinstance(x, bool) for x in layers)
    ):
        raise inner.fail("target_layer_ids", f"{layers!r} is not a list of layer numbers")
    count = keys.integer("num_target_layers") if "num_target_layers" in keys.values else None
    return DrafterConfig(model, block_size, mask, tuple(layers), count, _transition(keys, block_size))


def _transition(keys: _Keys, block_size: int) -> TransitionConfig | None:
    table = keys.section("transition_config")
    if table is None:
        return None
    strengths = table.values.get("strengths")
    if (
        not isinstance(strengths, list)
        or len(strengths) != block_size - 1
        or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in strengths)
        or not all(abs(x) <= _GREATEST for x in strengths)
    ):
        raise table.fail("strengths", f"{strengths!r} is not a list of {block_size - 1} numbers, one a slot")
    return TransitionConfig(table.integer("rank"), tuple(map(float, strengths)))


def _open(directory: Path, architectures: tuple[str, ...]) -> _Keys:
    if not directory.is_dir():
        raise CheckpointError(directory, "no such checkpoint directory")
    keys = _Keys(directory / CONFIG_NAME, read_json(directory / CONFIG_NAME))
    found = keys.values.get("architectures")
    if not isinstance(found, list) or not any(item in architectures for item in found):
        raise keys.fail("architectures", f"{found!r}; this engine serves {' or '.join(architectures)} here")
    return keys


def _model(keys: _Keys, eos_token_ids: frozenset[int]) -> ModelConfig:
    _refuse_unsupported(keys)
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", default=heads)
    hidden = keys.integer("hidden_size")
    if heads % kv_heads:
        raise keys.fail("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    head_dim = keys.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise keys.fail("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    longest = keys.integer("max_position_embeddings")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_hidden_layers=keys.integer("num_hidden_layers", high=_MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=longest,
        tie_word_embeddings=keys.values.get("tie_word_embeddings") is True,
        rope=_rope(keys, longest),
        eos_token_ids=eos_token_ids,
    )


def _refuse_unsupported(keys: _Keys) -> None:
    values = keys.values
    if values.get("hidden_act", "silu") != "silu":
        raise keys.fail("hidden_act", f"{values['hidden_act']!r} is not supported; silu is")
    if values.get("attention_bias"):
        raise keys.fail("attention_bias", "true is not supported")
    kinds = values.get("layer_types")
    if not isinstance(kinds, list | None):
        raise keys.fail("layer_types", f"{_shown(kinds)} is not a list")
    if values.get("use_sliding_window") or "sliding_attention" in (kinds or ()):
        raise keys.fail("use_sliding_window", "sliding window attention is not supported")
    if values.get("quantization_config") is not None:
        raise keys.fail("quantization_config", "quantised checkpoints are not supported")


def _rope(keys: _Keys, longest: int) -> RopeConfig:
    """The rotary settings, wherever this version of the layout keeps them."""
    scaling = keys.section("rope_parameters") or keys.section("rope_scaling")
    if scaling is None:
        return RopeConfig(theta=keys.number("rope_theta", default=10000.0))
    theta = (scaling if "rope_theta" in scaling.values else keys).number("rope_theta", default=10000.0)
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise scaling.fail("rope_type", f"{kind!r} is not supported; one of {', '.join(_ROPE_TYPES)} is")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor"))
    if scaling.values.get("mscale") or scaling.values.get("mscale_all_dim"):
        raise scaling.fail("mscale", "is not supported for this architecture")
    attention = "attention_factor"
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=scaling.number("factor"),
        original_max_position=scaling.integer("original_max_position_embeddings", default=longest),
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=scaling.number(attention) if scaling.values.get(attention) is not None else None,
    )


def _eos_ids(keys: _Keys, directory: Path) -> frozenset[int]:
    """End-of-sequence tokens: `generation_config.json` before `config.json`, as transformers does."""
    generation = directory / "generation_config.json"
    found: Any = None
    where = keys.path
    if generation.is_file():
        found = read_json(generation).get("eos_token_id")
        where = generation
    if found is None:
        found = keys.values.get("eos_token_id")
        where = keys.path
    listed = found if isinstance(found, list) else [] if found is None else [found]
    vocabulary = keys.integer("vocab_size")
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise CheckpointError(where, f"eos_token_id: {token!r} is not a token of {vocabulary}")
    return frozenset(listed)
