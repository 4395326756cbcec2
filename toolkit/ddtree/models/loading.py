"""Reads safetensors checkpoints into tensors, and refuses anything that does not fit the config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from toolkit.ddtree.models.config import CONFIG_NAME, DrafterConfig, ModelConfig, read_json
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.transition import TransitionTable

WEIGHTS_NAME = "model.safetensors"
TRANSITION_NAME = "transition.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 5

Shapes = dict[str, tuple[int, ...]]


def target_shapes(config: ModelConfig) -> Shapes:
    """Names and shapes of a Qwen3 target's tensors, as transformers saves them."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= _layer_shapes(config, f"model.layers.{layer}.")
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def drafter_shapes(config: DrafterConfig) -> Shapes:
    """Names and shapes of a DFlash drafter's tensors; embedding and head are the target's."""
    hidden = config.model.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, hidden * len(config.target_layer_ids)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.model.num_hidden_layers):
        shapes |= _layer_shapes(config.model, f"layers.{layer}.")
    return shapes


def load_target_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Load a target's tensors; a tied head that is stored all the same must equal the embedding.

    Raises:
        CheckpointError: see `load_tensors`.
    """
    optional: Shapes = {}
    if config.tie_word_embeddings:
        optional["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    tensors = load_tensors(directory, target_shapes(config), optional, dtype, device)
    head = tensors.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    if head is not None and not torch.equal(head, tensors["model.embed_tokens.weight"]):
        raise CheckpointError(
            directory / CONFIG_NAME,
            "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight",
        )
    return tensors


def load_drafter_weights(
    directory: Path, config: DrafterConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Load a drafter's tensors.

    Raises:
        CheckpointError: see `load_tensors`.
    """
    return load_tensors(directory, drafter_shapes(config), {}, dtype, device)


def load_transition(directory: Path, config: DrafterConfig, device: torch.device) -> TransitionTable | None:
    """Load a drafter's transition table; None if its config names none.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt, or a tensor is missing, unexpected, or of
            another shape or dtype.
    """
    table = config.transition
    if table is None:
        return None
    path, vocabulary = directory / TRANSITION_NAME, config.model.vocab_size
    if not path.is_file():
        raise CheckpointError(path, f"no such file, though transition_config of {CONFIG_NAME} calls for it")
    expected = {
        "left": ((vocabulary, table.rank), torch.int8),
        "left_scale": ((vocabulary,), torch.float16),
        "right": ((vocabulary, table.rank), torch.int8),
        "right_scale": ((vocabulary,), torch.float16),
    }
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, f"truncated or corrupt: {error}") from None
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                path, f"{name}: {_described(found.get(name))}; expected is {_described(expected.get(name))}"
            )
    for name in ("left_scale", "right_scale"):
        if not bool(torch.isfinite(tensors[name]).all()):
            raise CheckpointError(path, f"{name}: holds NaN or infinity")
    strengths = torch.tensor(table.strengths, device=device)
    return TransitionTable.quantised({name: part.to(device) for name, part in tensors.items()}, strengths)


def _described(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "no such tensor" if tensor is None else f"{tensor[1]} {list(tensor[0])}"


def check_pair(target: ModelConfig, drafter: DrafterConfig, directory: Path) -> None:
    """Check that a drafter belongs to a target, as far as the configs can tell.

    Raises:
        CheckpointError: hidden sizes or vocabularies differ, a captured layer does not exist or is the last
            one, or the drafter was made for a target of another depth.
    """
    path = directory / CONFIG_NAME
    for key in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(drafter.model, key), getattr(target, key)
        if ours != theirs:
            raise CheckpointError(
                path,
                f"{key} is {ours}, the target's is {theirs}; embedding and head are shared and must agree",
            )
    depth = target.num_hidden_layers
    if drafter.num_target_layers not in (None, depth):
        raise CheckpointError(
            path, f"num_target_layers is {drafter.num_target_layers}, but the target has {depth} layers"
        )
    for layer in drafter.target_layer_ids:
        if not 0 <= layer < depth - 1:
            raise CheckpointError(
                path,
                f"dflash_config.target_layer_ids: layer {layer} is not one of 0..{depth - 2}; the target has "
                f"{depth} layers and its last one is not captured",
            )


def load_tensors(
    directory: Path, shapes: Shapes, optional: Shapes, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Load the tensors of `shapes`, and those of `optional` that are there.

    Args:
        directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`.
        shapes: every tensor that must be there, with its shape.
        optional: tensors that may be there.
        dtype: dtype to convert to.
        device: device to load to.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt or a pickle; a tensor is missing, unexpected,
            of another shape, not floating point, or holds NaN or infinity.
    """
    files = _weight_files(directory)
    allowed = shapes | optional
    tensors: dict[str, Tensor] = {}
    for path, names in files.items():
        for name, tensor in _read_file(path, names, allowed):
            tensors[name] = tensor.to(device=device, dtype=dtype)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise CheckpointError(directory, f"tensors missing: {_listed(missing)}")
    return tensors


def _weight_files(directory: Path) -> dict[Path, frozenset[str] | None]:
    """Weight files, with the tensors that the index expects in each (None: whatever it holds)."""
    index = directory / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(index, "weight_map: missing or empty")
        return {directory / name: names for name, names in _by_file(index, weight_map).items()}
    single = directory / WEIGHTS_NAME
    if single.is_file():
        return {single: None}
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            directory / pickles[0],
            "pickled weights can run code and are refused; convert them to safetensors",
        )
    raise CheckpointError(directory, f"holds neither {WEIGHTS_NAME} nor {INDEX_NAME}")


def _by_file(index: Path, weight_map: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(index, f"weight_map.{tensor}: {name!r} is not a safetensors file beside it")
        files.setdefault(name, set()).add(tensor)
    return {name: frozenset(tensors) for name, tensors in files.items()}


def _read_file(path: Path, names: frozenset[str] | None, allowed: Shapes) -> Iterable[tuple[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(path, f"no such file, though {INDEX_NAME} lists it")
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            if names is not None and names - stored:
                raise CheckpointError(
                    path, f"lacks tensors that {INDEX_NAME} lists: {_listed(names - stored)}"
                )
            unexpected = [n for n in stored if n not in allowed and not n.endswith("rotary_emb.inv_freq")]
            if unexpected:
                raise CheckpointError(path, f"unexpected tensors: {_listed(unexpected)}")
            for name in sorted(stored & allowed.keys()):
                tensor = file.get_tensor(name)
                _check_tensor(path, name, tensor, allowed[name])
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, f"truncated or corrupt: {error}") from None


def _check_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            path, f"{name}: shape {list(tensor.shape)}, config.json calls for {list(shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            path, f"{name}: {tensor.dtype} is not supported; float32, bfloat16 and float16 are"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(path, f"{name}: holds NaN or infinity")


def _layer_shapes(config: ModelConfig, prefix: str) -> Shapes:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}self_attn.q_norm.weight": (dim,),
        f"{prefix}self_attn.k_norm.weight": (dim,),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
