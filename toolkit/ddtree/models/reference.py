"""Plain reference of target and drafter: no cache, no fused weights, one sequence, from the checkpoint.

What the engine computes is held against this, in tests and in the self-check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.ddtree.models.config import DrafterConfig, ModelConfig
from toolkit.ddtree.models.heads import rope_frequencies

Weights = Mapping[str, Tensor]


def target_forward(
    config: ModelConfig, weights: Weights, tokens: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Causal forward of a token sequence.

    Returns:
        Logits [n, vocabulary], and the output of each layer [n, hidden].
    """
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    positions = torch.arange(len(tokens))
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    outputs = []
    for layer in range(config.num_hidden_layers):
        x = _layer(config, weights, f"model.layers.{layer}.", x, None, positions, positions, causal)
        outputs.append(x)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T, outputs


def drafter_forward(
    config: DrafterConfig, weights: Weights, target: Weights, outputs: Sequence[Tensor], bonus: int
) -> Tensor:
    """Draft the block after a context.

    Args:
        config: the drafter's.
        weights: the drafter's.
        target: the target's, for embedding and head.
        outputs: the output of each target layer over the context, [s, hidden].
        bonus: the token at position s.

    Returns:
        Logits [block_size - 1, vocabulary] of the slots after the bonus token.
    """
    model = config.model
    context = torch.cat([outputs[layer] for layer in config.target_layer_ids], dim=1) @ weights["fc.weight"].T
    context = _norm(context, weights["hidden_norm.weight"], model.rms_norm_eps)
    embedding = target["model.embed_tokens.weight"]
    x = embedding[torch.tensor([bonus] + [config.mask_token_id] * (config.block_size - 1))]
    length = len(context)
    positions = torch.arange(length + config.block_size)
    everyone = torch.ones(config.block_size, length + config.block_size, dtype=torch.bool)
    for layer in range(model.num_hidden_layers):
        x = _layer(model, weights, f"layers.{layer}.", x, context, positions[length:], positions, everyone)
    head = target.get("lm_head.weight", embedding)
    return _norm(x[1:], weights["norm.weight"], model.rms_norm_eps) @ head.T


def _layer(
    config: ModelConfig, weights: Weights, prefix: str, x: Tensor, context: Tensor | None,
    q_positions: Tensor, k_positions: Tensor, seen: Tensor,
) -> Tensor:  # fmt: skip
    """One decoder layer; keys and values of `context` rows, if any, precede those of `x`."""

    def weight(name: str) -> Tensor:
        return weights[f"{prefix}{name}.weight"]

    def heads(rows: Tensor, name: str, positions: Tensor) -> Tensor:
        split = (rows @ weight(f"self_attn.{name}_proj").T).view(len(rows), -1, config.head_dim)
        if name != "v":
            split = _rotate(
                config, _norm(split, weight(f"self_attn.{name}_norm"), config.rms_norm_eps), positions
            )
        return split.transpose(0, 1)

    normed = _norm(x, weight("input_layernorm"), config.rms_norm_eps)
    rows = normed if context is None else torch.cat([context, normed])
    group = config.num_attention_heads // config.num_key_value_heads
    q = heads(normed, "q", q_positions)
    k = heads(rows, "k", k_positions).repeat_interleave(group, 0)
    v = heads(rows, "v", k_positions).repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * config.head_dim**-0.5
    attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    x = x + attended.transpose(0, 1).reshape(len(x), -1) @ weight("self_attn.o_proj").T
    normed = _norm(x, weight("post_attention_layernorm"), config.rms_norm_eps)
    gate = torch.nn.functional.silu(normed @ weight("mlp.gate_proj").T)
    return x + (gate * (normed @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotate(config: ModelConfig, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [n, heads, dim]; the partner of dimension i is i + dim / 2."""
    frequencies, scale = rope_frequencies(config.head_dim, config.rope)
    angles = positions[:, None, None] * frequencies
    cos, sin = (angles.cos() * scale).float(), (angles.sin() * scale).float()
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
