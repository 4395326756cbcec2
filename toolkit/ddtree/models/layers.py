"""What target and drafter share: RMS norm, rotary embedding, grouped-query attention and SwiGLU.

Rows are flat: a forward works on n = R * Q rows, R requests of Q rows each. Weights are prepared once, at
load, so that a decode step is few operations, which is what a small model on a CPU spends its time on: q, k
and v are one matrix, gate and up are one, the weight of a norm is multiplied into the matrix that follows it,
and the partners of a rotary pair lie beside each other, so that rotating is one complex product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from toolkit.ddtree.cache import SlotCache
from toolkit.ddtree.models.config import ModelConfig, RopeConfig
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


class Norm:
    """RMS norm without weight, over the last dimension: x / sqrt(mean(x^2) + eps), in float32."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self._scale = 1.0 / size
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def inverse(self, x: Tensor) -> Tensor:
        """What to multiply [..., size] by: float32 [..., 1]."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(self._eps, length, length, value=self._scale).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; the result has the dtype of `x`."""
        normed = x * self.inverse(x)  # float32, whatever x is
        return normed if x.dtype == torch.float32 else normed.to(x.dtype)


class Rope:
    """Rotary embedding (arXiv 2104.09864), with linear or YaRN (arXiv 2309.00071) scaling."""

    def __init__(self, head_dim: int, config: RopeConfig, length: int, device: torch.device) -> None:
        frequencies, scale = rope_frequencies(head_dim, config)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        table = torch.polar(torch.full_like(angles, scale), angles)
        self._table = table.to(torch.complex64).to(device).unsqueeze(1)

    def at(self, positions: Tensor) -> Tensor:
        """Rotations of positions int64 [n]: complex64 [n, 1, head_dim / 2]."""
        return self._table.index_select(0, positions)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Numbers of query and key/value heads, their size, and the weights of their norms, [heads, dim]."""

    query: int
    kv: int
    dim: int
    norm: Norm
    scale: Tensor

    def normalise_and_rotate(self, x: Tensor, scale: Tensor, rotation: Tensor) -> None:
        """Norm and rotate heads of q and k in place: [n, heads, dim]."""
        normed = (x * self.norm.inverse(x)).mul_(scale)
        turned = torch.view_as_complex(normed.view(*x.shape[:2], -1, 2))
        if x.dtype == torch.float32:
            torch.mul(turned, rotation, out=torch.view_as_complex(x.view(*x.shape[:2], -1, 2)))
        else:
            x.copy_(torch.view_as_real(turned * rotation).flatten(2))


class DecoderLayer:
    """One pre-norm decoder layer with per-head RMS norms on q and k (Qwen3, arXiv 2505.09388)."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: ModelConfig) -> None:
        device = weights[f"{prefix}input_layernorm.weight"].device
        dim, query, kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        pairs = _pair_order(dim).to(device)

        def paired(name: str, count: int) -> Tensor:
            weight = weights[f"{prefix}self_attn.{name}_proj.weight"]
            return weight.view(count, dim, -1)[:, pairs].reshape(count * dim, -1)

        q_norm, k_norm = (weights[f"{prefix}self_attn.{name}_norm.weight"][pairs].float() for name in "qk")
        scale = torch.cat([q_norm.expand(query, -1), k_norm.expand(kv, -1)]).contiguous()
        self._heads = _Heads(query, kv, dim, Norm(dim, config.rms_norm_eps, device), scale)
        q, k, v = paired("q", query), paired("k", kv), weights[f"{prefix}self_attn.v_proj.weight"]
        gate, up = weights[f"{prefix}mlp.gate_proj.weight"], weights[f"{prefix}mlp.up_proj.weight"]
        self._norm = Norm(config.hidden_size, config.rms_norm_eps, device)
        self._qkv = Linear(scaled(torch.cat([q, k, v]), weights[f"{prefix}input_layernorm.weight"]))
        self._context_kv = Linear(torch.cat([k, v]))
        self._o = Linear(weights[f"{prefix}self_attn.o_proj.weight"])
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
            mask: [R, 1, group * Q, T], see `attend`.

        Returns:
            [n, hidden].
        """
        heads = self._heads
        qkv = self._qkv(self._norm(x)).view(-1, heads.query + 2 * heads.kv, heads.dim)
        heads.normalise_and_rotate(qkv[:, : heads.query + heads.kv], heads.scale, rotation)
        kv.index_copy_(0, slots, qkv[:, heads.query :])
        x = self._o.add(attend(qkv[:, : heads.query], *seen, mask), x)
        gate_up = self._gate_up(self._norm(x))
        return self._down.add(F.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :]), x)

    def write_context(self, context: Tensor, rotation: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Write K/V of rows that are not decoded here (DFlash: projected hidden states of the target).

        Args:
            context: [n, hidden]; the layer's input norm does not apply to it.
            rotation: as in `forward`.
            kv: as in `forward`.
            slots: int64 [n], rows of `kv` to write.
        """
        heads = self._heads
        new = self._context_kv(context).view(-1, 2 * heads.kv, heads.dim)
        heads.normalise_and_rotate(new[:, : heads.kv], heads.scale[heads.query :], rotation)
        kv.index_copy_(0, slots, new)


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
        self._rope = Rope(config.head_dim, config.rope, positions, device)

    def forward(
        self, x: Tensor, rows: Rows, cache: SlotCache, capture: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run rows [n, hidden] through all layers; their output and those of the layers `capture`."""
        rotation = self._rope.at(rows.positions)
        mask = rows.mask
        if mask is not None and self._group > 1:
            mask = mask.repeat(1, 1, self._group, 1)
        captured: dict[int, Tensor] = {}
        seen = cache.visible(rows.first, rows.requests, rows.visible)
        for index, (layer, kv, pair) in enumerate(zip(self.layers, cache.rows, seen, strict=True)):
            x = layer.forward(x, rotation, kv, rows.slots, pair, mask)
            if index in capture:
                captured[index] = x
        return x, [captured[index] for index in capture]

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor, cache: SlotCache) -> None:
        """Write K/V of context rows [n, hidden] in every layer, see `DecoderLayer.write_context`."""
        rotation = self._rope.at(positions)
        for layer, kv in zip(self.layers, cache.rows, strict=True):
            layer.write_context(context, rotation, kv, slots)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention, softmax(q k^T / sqrt(dim) + mask) v.

    The query heads that share a key/value head become rows of one attention, so K/V is never repeated.

    Args:
        q: [R * Q, query heads, dim].
        k: [R, kv heads, T, dim], as is `v`.
        v: values.
        mask: [R, 1, group * Q, T], group-major, or None.

    Returns:
        [R * Q, query heads * dim].
    """
    requests, kv_heads = k.shape[:2]
    n, query_heads, dim = q.shape
    count, group = n // requests, query_heads // kv_heads
    q = q.view(requests, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(requests, kv_heads, group * count, dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return (
        out.view(requests, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4).reshape(n, query_heads * dim)
    )


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


def scaled(weight: Tensor, norm: Tensor) -> Tensor:
    """Multiply a norm's weight into the matrix [out, in] that follows it."""
    return (weight.float() * norm.float()).to(weight.dtype)


def rope_frequencies(head_dim: int, config: RopeConfig) -> tuple[Tensor, float]:
    """Angular frequencies, float64 [head_dim / 2], and the scale of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = config.theta**-exponents
    if config.kind == "default":
        return plain, 1.0
    if config.kind == "linear":
        return plain / config.factor, 1.0

    def dimension(rotations: float) -> float:
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low = max(math.floor(dimension(config.beta_fast)), 0)
    high = min(math.ceil(dimension(config.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0, 1)
    scale = config.attention_factor
    if scale is None:
        scale = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return plain / config.factor * (1 - keep) + plain * keep, scale


def _pair_order(head_dim: int) -> Tensor:
    """Order that puts the partners i and i + head_dim / 2 of a rotary pair beside each other."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().flatten()
