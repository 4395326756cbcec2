"""What precedes attention: RMS norm, rotary embedding, and query and key heads that both apply to.

Weights are prepared once, at load: the weight of a norm is multiplied into the matrix that follows it, and
the partners of a rotary pair lie beside each other, so that rotating is one complex product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.ddtree.models.config import RopeConfig


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
class Heads:
    """Numbers of query and key/value heads, their size, and the weights of their norms, [heads, dim]."""

    query: int
    kv: int
    dim: int
    norm: Norm
    scale: Tensor

    def normalise(self, x: Tensor, scale: Tensor) -> Tensor:
        """Norm heads of q or k [..., heads, dim]: complex64 [..., heads, dim / 2], a number a rotary pair."""
        normed = (x * self.norm.inverse(x)).mul_(scale)
        return torch.view_as_complex(normed.view(*x.shape[:-1], -1, 2))


def rotate(pairs: Tensor, rotation: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate what `Heads.normalise` gives: [..., heads, dim]."""
    return torch.view_as_real(pairs * rotation).flatten(-2).to(dtype)


def rotate_into(x: Tensor, pairs: Tensor, rotation: Tensor) -> None:
    """`rotate`, written to `x`."""
    if x.dtype == torch.float32:
        torch.mul(pairs, rotation, out=torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)))
    else:
        x.copy_(rotate(pairs, rotation, x.dtype))


def head_weights(
    weights: Mapping[str, Tensor], prefix: str, name: str, count: int, dim: int
) -> tuple[Tensor, Tensor]:
    """Prepare the query or key heads of one layer.

    Args:
        weights: the model's tensors.
        prefix: what the names of the layer's attention begin with, such as "layers.0.self_attn.".
        name: "q" or "k".
        count: heads.
        dim: size of a head.

    Returns:
        The projection [count * dim, in], with rotary partners side by side, and the norm's weight in the same
        order, float32 [count, dim].
    """
    projection, norm = weights[f"{prefix}{name}_proj.weight"], weights[f"{prefix}{name}_norm.weight"]
    order = torch.arange(dim, device=norm.device).view(2, dim // 2).t().flatten()
    paired = projection.view(count, dim, -1)[:, order].reshape(count * dim, -1)
    return paired, norm[order].float().expand(count, -1)


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
