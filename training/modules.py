"""Qwen3-architecture target and DFlash drafter for training.

Parameter names are those of the published layouts (``Qwen3ForCausalLM`` without its ``model.`` prefix, and
z-lab's ``DFlashDraftModel``), so a state dict is a checkpoint. Sources: the Qwen3 technical report
(arXiv 2505.09388) and DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Dimensions:
    """Sizes shared by both models; ``layers`` and ``intermediate`` differ."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6


class Rope(NamedTuple):
    """Cosines and sines at the positions of the queries and keys: [batch or 1, 1, rows, head_dim]."""

    cos_q: Tensor
    sin_q: Tensor
    cos_k: Tensor
    sin_k: Tensor


def rope_table(dims: Dimensions, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines: float32 [max_positions, head_dim] each."""
    exponents = torch.arange(0, dims.head_dim, 2, device=device).float() / dims.head_dim
    angles = torch.arange(dims.max_positions, device=device).float()[:, None] * dims.rope_theta**-exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; the result has x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys.

    With ``context``, keys and values are of the context rows followed by the input rows (DFlash).
    """

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = dims.heads, dims.kv_heads, dims.head_dim
        q_size, kv_size = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        self.q_proj = nn.Linear(dims.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(dims.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(dims.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, dims.hidden, bias=False)
        self.q_norm = RMSNorm(dims.head_dim, dims.norm_eps)
        self.k_norm = RMSNorm(dims.head_dim, dims.norm_eps)

    def qkv(self, x: Tensor, context: Tensor | None, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, Q, head_dim], rotated keys and values [B, kv_heads, K, head_dim]."""
        source = x if context is None else torch.cat([context, x], 1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(source).unflatten(-1, (self.kv_heads, self.head_dim))).transpose(1, 2)
        v = self.v_proj(source).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return _rotate(q, rope.cos_q, rope.sin_q), _rotate(k, rope.cos_k, rope.sin_k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Attention output after ``o_proj``: [B, Q, hidden]."""
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.down_proj = nn.Linear(dims.intermediate, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer, causal unless a mask is given."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.self_attn = Attention(dims)
        self.mlp = MLP(dims)
        self.input_layernorm = RMSNorm(dims.hidden, dims.norm_eps)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.norm_eps)

    def forward(
        self, x: Tensor, rope: Rope, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """[B, Q, hidden] -> [B, Q, hidden]."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), context, rope)
        x = x + self.self_attn.attend(q, k, v, mask, causal=mask is None)
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(self, x: Tensor, rope: Rope, keys: Tensor, values: Tensor, position: int) -> Tensor:
        """Run one row a sequence; writes its keys and values [B, kv_heads, capacity, head_dim]."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), None, rope)
        keys[:, :, position : position + 1], values[:, :, position : position + 1] = k, v
        # One position: the query heads of a group see the same keys, so they are rows of one attention head.
        grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
        out = functional.scaled_dot_product_attention(
            grouped, keys[:, :, : position + 1], values[:, :, : position + 1]
        )
        x = x + self.self_attn.o_proj(out.reshape(len(x), 1, -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        self.embed_tokens = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.layers))
        self.norm = RMSNorm(dims.hidden, dims.norm_eps)
        initialise(self, dims.layers)

    def forward(
        self, ids: Tensor, table: tuple[Tensor, Tensor], capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run a batch of rows from position 0.

        Args:
            ids: int64 [B, T].
            table: As ``rope_table`` gives it.
            capture: 0-based layers whose outputs are wanted.

        Returns:
            Final hidden states [B, T, hidden], and the captured ones side by side
            [B, T, len(capture) * hidden].
        """
        cos, sin = table[0][: ids.shape[1]], table[1][: ids.shape[1]]
        rope = Rope(cos, sin, cos, sin)
        x = self.embed_tokens(ids)
        features = []
        for index, layer in enumerate(self.layers):
            x = layer(x, rope)
            if index in capture:
                features.append(x)
        return self.norm(x), torch.cat(features, -1) if features else x.new_empty(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocab] of final hidden states, the target's or the drafter's."""
        return functional.linear(hidden, self.embed_tokens.weight).float()


class Drafter(nn.Module):
    """DFlash block-diffusion drafter; embeddings and output head are the target's."""

    def __init__(self, dims: Dimensions, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features * dims.hidden, dims.hidden, bias=False)
        self.hidden_norm = RMSNorm(dims.hidden, dims.norm_eps)
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.layers))
        self.norm = RMSNorm(dims.hidden, dims.norm_eps)
        initialise(self, dims.layers)

    def forward(
        self, noise: Tensor, features: Tensor, positions: Tensor, mask: Tensor, table: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Draft many blocks of each row at once.

        Args:
            noise: Embeddings of the blocks' slots [B, Q, hidden], Q = blocks * block_size.
            features: Captured target hidden states of positions 0..T-1 [B, T, features * hidden].
            positions: Positions of the slots, int64 [B, Q].
            mask: Which of the T context rows and Q slots each slot sees, bool [B, 1, Q, T + Q].
            table: As ``rope_table`` gives it.

        Returns:
            Hidden states for the target's output head [B, Q, hidden].
        """
        rows = torch.arange(features.shape[1], device=positions.device).expand(len(positions), -1)
        all_positions = torch.cat([rows, positions], 1)
        cos, sin = (part[all_positions][:, None] for part in table)
        length = features.shape[1]
        rope = Rope(cos[:, :, length:], sin[:, :, length:], cos, sin)
        context = self.hidden_norm(self.fc(features))
        x = noise
        for layer in self.layers:
            x = layer(x, rope, context, mask)
        return self.norm(x)


def initialise(model: nn.Module, layers: int) -> None:
    """Normal(0, 0.02) matrices; those that write to the residual stream scaled down by its depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = (2 * layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)


def draft_blocks(
    ids: Tensor, anchors: Tensor, block_size: int, mask_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, positions and visibility of one draft block for each anchor.

    Slot 0 of a block holds the anchor's own token (the bonus token), the others the mask token. A slot sees
    the context before its anchor and its own block, in both directions.

    Args:
        ids: int64 [B, T].
        anchors: int64 [B, N].
        block_size: Slots a block.
        mask_id: Id of the mask token.

    Returns:
        Slot ids int64 [B, N * block_size], positions int64 of the same shape, mask bool [B, 1, Q, T + Q].
    """
    batch, count = anchors.shape
    offsets = torch.arange(block_size, device=ids.device)
    positions = (anchors[..., None] + offsets).flatten(1)
    slots = torch.full((batch, count, block_size), mask_id, device=ids.device)
    slots[..., 0] = ids.gather(1, anchors)
    context = torch.arange(ids.shape[1], device=ids.device) < anchors[..., None]
    context = context.repeat_interleave(block_size, 1)
    block = torch.arange(count * block_size, device=ids.device) // block_size
    own = (block[:, None] == block).expand(batch, -1, -1)
    return slots.flatten(1), positions, torch.cat([context, own], -1)[:, None]
