"""The drafter's context: K/V of committed positions, of all its layers at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.ddtree.cache import SlotCache
from toolkit.ddtree.models.config import ModelConfig
from toolkit.ddtree.models.heads import Heads, Norm, Rope, head_weights, rotate_into, scaled
from toolkit.ddtree.models.linear import Linear


class ContextProjection:
    """Keys and values of all layers from what the target's hidden states are projected to.

    Args:
        weights: the drafter's tensors under their names in the checkpoint.
        config: its shape.
        rope: its rotary embedding.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, rope: Rope) -> None:
        dim, kv = config.head_dim, config.num_key_value_heads
        projections, scales = [], []
        for layer in range(config.num_hidden_layers):
            attention = f"layers.{layer}.self_attn."
            k, scale = head_weights(weights, attention, "k", kv, dim)
            projections += [k, weights[f"{attention}v_proj.weight"]]
            scales.append(scale)
        device = projections[0].device
        self._fc = Linear(weights["fc.weight"])
        self._norm = Norm(config.hidden_size, config.rms_norm_eps, device)
        self._kv = Linear(scaled(torch.cat(projections), weights["hidden_norm.weight"]))
        self._heads = Heads(0, kv, dim, Norm(dim, config.rms_norm_eps, device), torch.stack(scales))
        self._rope = rope

    def write(self, hidden: Tensor, positions: Tensor, slots: Tensor, cache: SlotCache) -> None:
        """Write the K/V of rows in every layer.

        Args:
            hidden: [n, layers * hidden], the target's captured outputs.
            positions: int64 [n].
            slots: int64 [n], cache rows to write.
            cache: the context's K/V.
        """
        heads = self._heads
        layers = len(heads.scale)
        kv = self._kv(self._norm(self._fc(hidden))).view(-1, layers, 2 * heads.kv, heads.dim)
        keys = kv[:, :, : heads.kv]
        rotate_into(keys, heads.normalise(keys, heads.scale), self._rope.at(positions).unsqueeze(1))
        cache.write(slots, kv)
