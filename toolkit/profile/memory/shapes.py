"""Sizes of checkpoints: those of `shapes.toml` by name, and any by its own config.json."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import ToolkitError

_FILE = Path(__file__).with_name("shapes.toml")
_PLAIN = 2.0  # bytes of a bf16 value


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a checkpoint decides how much memory it takes and how it may be spread.

    Attributes:
        name: of the shape, or the folder that it was read from.
        attention: "MLA" caches a latent of `kv_rank + rope_dim` values a token, "MHA" keys and values.
        layers, hidden, heads, vocabulary: as in config.json.
        intermediate: width of a plain MLP, which the first `dense_layers` layers have.
        context: tokens of the longest text.
        kv_heads, head_dim: of MHA.
        q_rank, kv_rank, rope_dim, nope_dim, v_dim: of MLA.
        experts, experts_per_token, shared_experts, expert_intermediate: of the other layers.
        quantization: SGLang's name for how the weights are packed; empty if they are not.
        expert_bytes: bytes of a routed expert's parameter, scales included.
        value_bytes: bytes of every other parameter.
        weight_bytes: of the checkpoint's files; 0 if it is not known.
        other_bytes: what each GPU holds whole, such as a vision tower.
        tied: whether lm_head is the embedding.
        block_size: of a drafter; 0 for a target.
        captured_layers: layers of the target that a drafter reads.
        sources: how the values are known.
    """

    name: str
    attention: Literal["MLA", "MHA"]
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    context: int
    dense_layers: int
    kv_heads: int = 0
    head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_intermediate: int = 0
    quantization: str = ""
    expert_bytes: float = _PLAIN
    value_bytes: float = _PLAIN
    weight_bytes: int = 0
    other_bytes: int = 0
    tied: bool = False
    block_size: int = 0
    captured_layers: tuple[int, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_drafter(self) -> bool:
        """Whether it drafts: it then has no embedding and no lm_head of its own, but the target's."""
        return self.block_size > 0


@cache
def shapes() -> Mapping[str, Shape]:
    """The known shapes by name."""
    with _FILE.open("rb") as file:
        entries = tomllib.load(file).values()
    found = [
        Shape(**{**entry, "captured_layers": tuple(entry.get("captured_layers", ()))}) for entry in entries
    ]
    return {shape.name: shape for shape in found}


def shape_of(folder: Path) -> Shape:
    """The shape of the checkpoint in `folder`, by its config.json and the sizes of its files.

    Raises:
        ToolkitError: config.json is absent, no JSON, or lacks a number; names the file and the key.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ToolkitError(f"{path}: is no JSON", hint="fetch the checkpoint again") from None
    if not isinstance(config, dict):
        raise ToolkitError(f"{path}: is no JSON object", hint="fetch the checkpoint again")
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        return shape_from_config(config, str(folder), files)
    except KeyError as error:
        raise ToolkitError(f"{path}: {error.args[0]} is missing or no number") from None


def shape_from_config(config: Mapping[str, Any], name: str, weight_bytes: int = 0) -> Shape:
    """The shape that a config.json describes; a multimodal one keeps its numbers under `text_config`.

    Raises:
        KeyError: names a number that is missing.
    """
    text = config.get("text_config")
    values: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    latent = "kv_lora_rank" in values
    heads, layers = _number(values, "num_attention_heads"), _number(values, "num_hidden_layers")
    hidden = _number(values, "hidden_size")
    experts = _first(values, "n_routed_experts", "num_experts", "num_local_experts")
    quantization = values.get("quantization_config") or config.get("quantization_config")
    packed = expert_bytes(quantization) if isinstance(quantization, Mapping) else _PLAIN
    drafts = config.get("dflash_config") if isinstance(config.get("dflash_config"), Mapping) else {}
    block = _first(values, "block_size") or _first(drafts or {}, "block_size")
    captured = (drafts or {}).get("target_layer_ids") or values.get("target_layer_ids") or ()
    return Shape(
        name=name,
        attention="MLA" if latent else "MHA",
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=_number(values, "intermediate_size"),
        vocabulary=_number(values, "vocab_size"),
        context=_number(values, "max_position_embeddings"),
        dense_layers=min(layers, _first(values, "first_k_dense_replace")) if experts else layers,
        kv_heads=0 if latent else _first(values, "num_key_value_heads") or heads,
        head_dim=0 if latent else _first(values, "head_dim") or hidden // heads,
        q_rank=_first(values, "q_lora_rank"),
        kv_rank=_first(values, "kv_lora_rank"),
        rope_dim=_number(values, "qk_rope_head_dim") if latent else 0,
        nope_dim=_number(values, "qk_nope_head_dim") if latent else 0,
        v_dim=_number(values, "v_head_dim") if latent else 0,
        experts=experts,
        experts_per_token=_first(values, "num_experts_per_tok"),
        shared_experts=_first(values, "n_shared_experts"),
        expert_intermediate=_first(values, "moe_intermediate_size"),
        quantization=_method(quantization) if isinstance(quantization, Mapping) else "",
        expert_bytes=packed,
        # Quantizers of mixtures leave attention and shared experts as they are.
        value_bytes=_PLAIN if experts else packed,
        weight_bytes=weight_bytes,
        tied=bool(values.get("tie_word_embeddings", False)),
        block_size=block,
        captured_layers=tuple(int(layer) for layer in captured),
    )


def expert_bytes(quantization: Mapping[str, Any]) -> float:
    """Bytes of one packed parameter with its share of the scales, by a `quantization_config`."""
    groups = quantization.get("config_groups")
    weights: Any = quantization
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return _PLAIN
    bits = _first(weights, "num_bits", "bits")
    if not bits:
        bits = 8 if "fp8" in str(quantization.get("quant_method", "")) else 0
    if not bits:
        return _PLAIN
    group = _first(weights, "group_size")
    # 4-bit floats have fp8 scales, integers bf16 ones.
    scale = 1 if str(weights.get("type")) == "float" else _PLAIN
    return bits / 8 + (scale / group if group > 0 else 0)


def _method(quantization: Mapping[str, Any]) -> str:
    """SGLang's name: modelopt's formats each have one of their own."""
    method = str(quantization.get("quant_method", ""))
    algorithm = str(quantization.get("quant_algo", "")).upper()
    return {"NVFP4": "modelopt_fp4", "FP8": "modelopt_fp8"}.get(algorithm, method)


def _number(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise KeyError(key)
    return value


def _first(values: Mapping[str, Any], *keys: str) -> int:
    """The first of the keys that has a number; 0 if none has."""
    found = (values.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), 0)
