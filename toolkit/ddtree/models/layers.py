"""What target and drafter share: RMS norm, rotary embedding, grouped-query attention and SwiGLU.

Rows are flat: a forward works on n = R * Q rows, R requests of Q rows each. Weights are prepared once at load so
that a decode step is few operations, which is what a small model on a CPU spends its time on: q, k and v are one
matrix, gate and up are one, the weight of a norm is multiplied into the matrix that follows it, and
the two halves of a rotary pair lie beside each other so that the rotation is one complex product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from toolkit.ddtree.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one forward stand.

    Attributes:
        positions: int64 [n], position of each row in its sequence.
        slots: int64 [n], K/V row that each writes, counted over all slots of the cache.
        first: first slot of the cache that takes part.
        requests: R, how many slots from there on do.
        visible: T, K/V rows of each slot that are looked at.
        mask: float [R, 1, 1, Q, T], 0 where a row sees a K/V row and -inf where not; None if all see all.
    """

    positions: Tensor
    slots: Tensor
    first: int
    requests: int
    visible: int
    mask: Tensor | None


class Norm:
    """RMS norm without weight: x / sqrt(mean(x^2) + eps) over the last dimension, in float32 or wider."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self._scale = 1.0 / size
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; the result has the dtype of `x`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = torch.addcmul(self._eps, length, length, value=self._scale).rsqrt_()
        return x * inverse if x.dtype == torch.float32 else (x.float() * inverse).to(x.dtype)


class Linear:
    """x @ weight.T without bias, for a weight [out, in] that is kept transposed."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        return x @ self._weight

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Residual + x @ weight.T, [n, out]."""
        return torch.addmm(residual, x, self._weight)


class Rope:
    """Rotary embedding tables (arXiv 2104.09864), with linear or YaRN (arXiv 2309.00071) scaling."""

    def __init__(self, head_dim: int, config: RopeConfig, length: int, device: torch.device) -> None:
        frequencies, scale = _frequencies(head_dim, config)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        table = torch.polar(torch.full_like(angles, scale), angles)
        self._table = table.to(torch.complex64).to(device).unsqueeze(1)

    def at(self, positions: Tensor) -> Tensor:
        """Rotations of positions int64 [n]: complex64 [n, 1, head_dim / 2]."""
        return self._table.index_select(0, positions)


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and of key/value heads, and their size."""

    query: int
    kv: int
    dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> Heads:
        """The heads of a model."""
        return cls(config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    @property
    def kv_width(self) -> int:
        """Elements of a K/V row: keys, then values."""
        return 2 * self.kv * self.dim


class DecoderLayer:
    """One pre-norm decoder layer with per-head RMS norms on q and k (Qwen3, arXiv 2505.09388)."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, config: ModelConfig) -> None:
        heads = self.heads = Heads.of(config)
        device = weights[f"{prefix}input_layernorm.weight"].device
        self._input_norm = Norm(config.hidden_size, config.rms_norm_eps, device)
        self._head_norm = Norm(heads.dim, config.rms_norm_eps, device)
        pairs = _pair_order(heads.dim)

        def paired(name: str, count: int) -> Tensor:
            weight = weights[f"{prefix}self_attn.{name}_proj.weight"]
            return weight.view(count, heads.dim, -1)[:, pairs].reshape(count * heads.dim, -1)

        q, k = paired("q", heads.query), paired("k", heads.kv)
        v = weights[f"{prefix}self_attn.v_proj.weight"]
        scale = weights[f"{prefix}input_layernorm.weight"]
        self._qkv = Linear(scaled(torch.cat([q, k, v]), scale))
        self._context_kv = torch.cat([k, v])
        q_norm, k_norm = (weights[f"{prefix}self_attn.{name}_norm.weight"][pairs] for name in "qk")
        self._qk_scale = torch.cat([q_norm.expand(heads.query, -1), k_norm.expand(heads.kv, -1)]).contiguous()
        self._o = Linear(weights[f"{prefix}self_attn.o_proj.weight"])
        gate, up = weights[f"{prefix}mlp.gate_proj.weight"], weights[f"{prefix}mlp.up_proj.weight"]
        self._gate_up = Linear(
            scaled(torch.cat([gate, up]), weights[f"{prefix}post_attention_layernorm.weight"])
        )
        self._down = Linear(weights[f"{prefix}mlp.down_proj.weight"])
        self._inner = config.intermediate_size

    def forward(self, x: Tensor, rotation: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """Run the layer, writing the rows' K/V first.

        Args:
            x: [n, hidden].
            rotation: complex64 [n, 1, dim / 2], see `Rope.at`.
            kv: [slots, capacity, 2, kv heads, dim], this layer's K/V of all slots; written in place.
            rows: where the rows stand.

        Returns:
            [n, hidden].
        """
        heads = self.heads
        qkv = self._qkv(self._input_norm(x)).view(x.shape[0], heads.query + 2 * heads.kv, heads.dim)
        self._rotate(qkv[:, : heads.query + heads.kv], self._qk_scale, rotation)
        store(kv, rows.slots, qkv[:, heads.query :])
        x = self._o.add(attend(qkv[:, : heads.query], kv, rows), x)
        gate_up = self._gate_up(self._input_norm(x))
        return self._down.add(F.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :]), x)

    def write_context(self, context: Tensor, rotation: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Write K/V of context rows that are not themselves decoded (DFlash: projected target hidden states).

        Args:
            context: [n, hidden], already normed; the layer's input norm does not apply to it.
            rotation: as `forward`.
            kv: as `forward`.
            slots: int64 [n], K/V rows to write.
        """
        heads = self.heads
        new = (context @ self._context_kv.t()).view(-1, 2 * heads.kv, heads.dim)
        self._rotate(new[:, : heads.kv], self._qk_scale[heads.query :], rotation)
        store(kv, slots, new)

    def _rotate(self, x: Tensor, scale: Tensor, rotation: Tensor) -> None:
        """Norm and rotate the heads of q and k in place: [n, heads, dim]."""
        normed = (self._head_norm(x) * scale).float().unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(normed) * rotation)
        x.copy_(turned.flatten(-2))


def store(kv: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write K/V rows [n, 2 * kv heads, dim] at `slots`, counted over all slots of the cache."""
    kv.flatten(0, 1).index_copy_(0, slots, new.unflatten(1, (2, -1)))


def attend(q: Tensor, kv: Tensor, rows: Rows) -> Tensor:
    """Grouped-query attention of [n, query heads, dim] over the first `rows.visible` K/V rows of each slot.

    The query heads that share a key/value head become rows of one attention, so K/V is never repeated.

    Returns:
        [n, query heads * dim].
    """
    requests, visible = rows.requests, rows.visible
    n, query_heads, dim = q.shape
    kv_heads = kv.shape[3]
    count, group = n // requests, query_heads // kv_heads
    k, v = kv[rows.first : rows.first + requests, :visible].unbind(2)
    q = q.view(requests, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    mask = rows.mask
    if mask is not None:
        mask = mask.expand(-1, -1, group, -1, -1).reshape(requests, 1, group * count, visible)
    out = F.scaled_dot_product_attention(
        q.reshape(requests, kv_heads, group * count, dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
    )
    return (
        out.view(requests, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4).reshape(n, query_heads * dim)
    )


def attention_mask(lengths: Tensor, new: Tensor, visible: int, dtype: torch.dtype) -> Tensor:
    """Mask of requests whose committed lengths may differ.

    Args:
        lengths: int64 [R], committed rows of each request; all its new rows see them.
        new: bool [R or 1, Q, Q], which new row (the K/V rows from `lengths` on) sees which.
        visible: T, at least the greatest length + Q.
        dtype: dtype of the attention.

    Returns:
        [R, 1, 1, Q, T], 0 where seen and -inf where not.
    """
    requests, count = lengths.shape[0], new.shape[-1]
    column = torch.arange(visible, device=lengths.device) - lengths[:, None]
    index = column.clamp(0, count - 1)[:, None].expand(-1, count, -1)
    among = new.expand(requests, -1, -1).gather(2, index)
    seen = (column < 0)[:, None] | (among & (column < count)[:, None])
    mask = torch.zeros(seen.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(~seen, -math.inf)[:, None, None]


def _frequencies(head_dim: int, config: RopeConfig) -> tuple[Tensor, float]:
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
    half = head_dim // 2
    return torch.arange(head_dim).view(2, half).t().flatten()


def scaled(weight: Tensor, norm: Tensor) -> Tensor:
    """Multiply a norm's weight into the matrix [out, in] that follows it."""
    return (weight.float() * norm.float()).to(weight.dtype)
