"""Checkpoints in the public layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.data import EOS, MASK, SPECIAL_TOKENS
from training.modules import Dimensions, Drafter, Target

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def config_fields(dims: Dimensions, architecture: str) -> dict[str, Any]:
    """The Qwen3 configuration fields that both models share."""
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": EOS,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "initializer_range": 0.02,
        "intermediate_size": dims.intermediate,
        "layer_types": ["full_attention"] * dims.layers,
        "max_position_embeddings": dims.max_positions,
        "max_window_layers": dims.layers,
        "model_type": "qwen3",
        "num_attention_heads": dims.heads,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": dims.kv_heads,
        "pad_token_id": EOS,
        "rms_norm_eps": dims.norm_eps,
        "rope_scaling": None,
        "rope_theta": dims.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": dims.vocab,
    }


def read_dimensions(folder: Path) -> Dimensions:
    """Sizes of an exported model."""
    config = json.loads((folder / "config.json").read_text())
    return Dimensions(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )


def save_target(folder: Path, target: Target, tokenizer: Tokenizer) -> None:
    """Write a ``Qwen3ForCausalLM`` checkpoint with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value for name, value in target.state_dict().items()}
    save_file(_bfloat16(weights), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config_fields(target.dims, "Qwen3ForCausalLM"))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS, "do_sample": False},
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[EOS],
            "mask_token": SPECIAL_TOKENS[MASK],
            "model_max_length": target.dims.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def load_target(folder: Path, device: torch.device) -> Target:
    """Load what ``save_target`` wrote, in float32."""
    target = Target(read_dimensions(folder))
    weights = load_file(folder / "model.safetensors")
    target.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return target.to(device)


def save_drafter(
    folder: Path,
    drafter: Drafter,
    dims: Dimensions,
    block_size: int,
    capture: tuple[int, ...],
    target_layers: int,
) -> None:
    """Write a checkpoint in z-lab's public DFlash layout, without a transition table."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_bfloat16(drafter.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    config = config_fields(dims, "DFlashDraftModel") | {
        "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(capture)},
        "num_target_layers": target_layers,
    }
    _write_json(folder / "config.json", dict(sorted(config.items())))


def save_transition(folder: Path, factors: dict[str, Tensor], strength: float) -> None:
    """Add a transition table to a drafter's checkpoint: ``transition.safetensors`` and a part of its config.

    Args:
        folder: The drafter's.
        factors: As ``Transition.exported`` gives them.
        strength: What to multiply the strengths by.
    """
    tensors = {name: value.cpu().contiguous() for name, value in factors.items() if name != "strengths"}
    save_file(tensors, folder / "transition.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["transition_config"] = {
        "rank": tensors["left"].shape[1],
        "strengths": [round(float(value) * strength, 4) for value in factors["strengths"]],
    }
    _write_json(folder / "config.json", dict(sorted(config.items())))


def load_drafter(folder: Path, device: torch.device) -> Drafter:
    """Load what ``save_drafter`` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    drafter = Drafter(read_dimensions(folder), len(config["dflash_config"]["target_layer_ids"]))
    weights = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: value.float() for name, value in weights.items()})
    return drafter.to(device)


def _bfloat16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
