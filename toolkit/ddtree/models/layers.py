"""The decoder layers that target and drafter share: grouped-query attention and SwiGLU.

Rows are flat: a forward works on n = R * Q rows, R requests of Q rows each. A decode step is few operations,
which is what a small model on a CPU spends its time on: q, k and v are one matrix, gate and up are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from toolkit.ddtree.cache import SlotCache
from toolkit.ddtree.models.config import ModelConfig
from toolkit.ddtree.models.heads import Heads, Norm, Rope, head_weights, rotate, rotate_into, scaled
from toolkit.ddtree.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one forward stand.

    Attributes:
        positions: int64 [n], position of each row in its sequence.
        slots: int64 [n], K/V row that each writes, counted over all slots of the cache.
        first: first slot of the cache that takes part.
        requests: R, how many slots from there on do.
        visible: T, K/V rows of each slot that are looked at.
        mask: float [R, 1, Q, T], 0 where a row sees a K/V row and -inf where not; None if all see all.
    """

    positions: Tensor
    slots: Tensor
    first: int
    requests: int
    visible: int
    mask: Tensor | None


class DecoderLayer:
    """One pre-norm decoder layer with per-head RMS norms on q and k (Qwen3, arXiv 2505.09388)."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: ModelConfig) -> None:
        device = weights[f"{prefix}input_layernorm.weight"].device
        dim, query, kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        attention = f"{prefix}self_attn."
        q, q_scale = head_weights(weights, attention, "q", query, dim)
        k, k_scale = head_weights(weights, attention, "k", kv, dim)
        q = q.view(kv, query // kv, dim, -1).transpose(0, 1).flatten(0, 2)  # see `attend`
        v = weights[f"{attention}v_proj.weight"]
        scale = torch.cat([q_scale, k_scale])
        self._heads = Heads(query, kv, dim, Norm(dim, config.rms_norm_eps, device), scale)
        gate, up = weights[f"{prefix}mlp.gate_proj.weight"], weights[f"{prefix}mlp.up_proj.weight"]
        self._norm = Norm(config.hidden_size, config.rms_norm_eps, device)
        self._qkv = Linear(scaled(torch.cat([q, k, v]), weights[f"{prefix}input_layernorm.weight"]))
        o = weights[f"{attention}o_proj.weight"].view(-1, kv, query // kv, dim)
        self._o = Linear(o.transpose(1, 2).flatten(1))
        after = weights[f"{prefix}post_attention_layernorm.weight"]
        self._gate_up = Linear(scaled(torch.cat([gate, up]), after))
        self._down = Linear(weights[f"{prefix}mlp.down_proj.weight"])
        self._inner = config.intermediate_size

    def forward(
        self,
        x: Tensor,
        rotation: Tensor,
        kv: Tensor,
        slots: Tensor,
        seen: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """Run the layer, writing the rows' K/V first.

        Args:
            x: [n, hidden].
            rotation: complex64 [n, 1, dim / 2], see `Rope.at`.
            kv: [rows, 2 * kv heads, dim], this layer's K/V of all slots; written in place.
            slots: int64 [n], rows of `kv` to write.
            seen: keys and values to attend to, views of `kv`, [R, kv heads, T, dim].
            mask: [R, 1, Q * group, T], see `attend`.

        Returns:
            [n, hidden].
        """
        heads = self._heads
        qkv = self._qkv(self._norm(x)).view(-1, heads.query + 2 * heads.kv, heads.dim)
        pairs = heads.normalise(qkv[:, : heads.query + heads.kv], heads.scale)
        q = rotate(pairs[:, : heads.query], rotation, x.dtype)
        new = qkv[:, heads.query :]
        rotate_into(new[:, : heads.kv], pairs[:, heads.query :], rotation)
        kv.index_copy_(0, slots, new)
        x = self._o.add(attend(q, *seen, mask), x)
        gate_up = self._gate_up(self._norm(x))
        return self._down.add(F.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :]), x)


class DecoderStack:
    """The decoder layers of one model, with their rotary embedding."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        prefix: str,
        config: ModelConfig,
        positions: int,
        device: torch.device,
    ) -> None:
        self.layers = [
            DecoderLayer(weights, f"{prefix}{i}.", config) for i in range(config.num_hidden_layers)
        ]
        self._group = config.num_attention_heads // config.num_key_value_heads
        self.rope = Rope(config.head_dim, config.rope, positions, device)

    def forward(
        self, x: Tensor, rows: Rows, cache: SlotCache, capture: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run rows [n, hidden] through all layers; their output and those of the layers `capture`."""
        rotation = self.rope.at(rows.positions)
        mask = rows.mask
        if mask is not None and self._group > 1:
            mask = mask.repeat_interleave(self._group, 2)
        captured: dict[int, Tensor] = {}
        seen = cache.visible(rows.first, rows.requests, rows.visible)
        for index, (layer, kv, pair) in enumerate(zip(self.layers, cache.rows, seen, strict=True)):
            x = layer.forward(x, rotation, kv, rows.slots, pair, mask)
            if index in capture:
                captured[index] = x
        return x, [captured[index] for index in capture]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention, softmax(q k^T / sqrt(dim) + mask) v.

    The query heads that share a key/value head become rows of one attention, so K/V is never repeated. Head j
    of `q` belongs to key/value head j % kv heads, so that all this is a matter of views.

    Args:
        q: [R * Q, query heads, dim].
        k: [R, kv heads, T, dim], as is `v`.
        v: values.
        mask: [R, 1, Q * group, T], each row's heads side by side, or None.

    Returns:
        [R * Q, query heads * dim], the heads in the order of `q`.
    """
    requests, kv_heads = k.shape[:2]
    n, query_heads, dim = q.shape
    q = q.view(requests, -1, kv_heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(n, query_heads * dim)


def attention_mask(lengths: Tensor, new: Tensor, visible: int, dtype: torch.dtype) -> Tensor:
    """Mask of requests whose committed lengths may differ.

    Args:
        lengths: int64 [R], committed rows of each request; all its new rows see them.
        new: bool [R or 1, Q, Q], which new row (the K/V rows from `lengths` on) sees which.
        visible: T, at least the greatest length + Q; exactly that if R is 1.
        dtype: dtype of the attention.

    Returns:
        [R, 1, Q, T], 0 where seen and -inf where not.
    """
    requests, count = lengths.shape[0], new.shape[-1]
    mask = torch.zeros(requests, 1, count, visible, dtype=dtype, device=lengths.device)
    if requests == 1:
        mask[:, 0, :, visible - count :].masked_fill_(~new, -math.inf)
        return mask
    column = torch.arange(visible, device=lengths.device) - lengths[:, None]
    index = column.clamp(0, count - 1)[:, None].expand(-1, count, -1)
    among = new.expand(requests, -1, -1).gather(2, index)
    seen = (column < 0)[:, None] | (among & (column < count)[:, None])
    return mask.masked_fill_(~seen[:, None], -math.inf)
