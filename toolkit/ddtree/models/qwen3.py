"""The target: a Qwen3-architecture decoder over slots of cached K/V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from toolkit.ddtree.cache import SlotCache
from toolkit.ddtree.models.config import ModelConfig, read_target_config
from toolkit.ddtree.models.heads import Norm, scaled
from toolkit.ddtree.models.layers import DecoderStack, Rows
from toolkit.ddtree.models.linear import Linear
from toolkit.ddtree.models.loading import load_target_weights


class Qwen3Target:
    """Target model.

    Args:
        config: its shape.
        weights: its tensors under transformers' names.
        positions: rotary positions to prepare, beyond which no row may stand.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], positions: int) -> None:
        self.config = config
        self.positions = positions
        self.embedding = weights["model.embed_tokens.weight"]
        self.head_weight = weights.get("lm_head.weight", self.embedding)
        device = self.embedding.device
        self._stack = DecoderStack(weights, "model.layers.", config, positions, device)
        self._norm = Norm(config.hidden_size, config.rms_norm_eps, device)
        self._head = Linear(scaled(self.head_weight, weights["model.norm.weight"]))

    @classmethod
    def load(cls, directory: Path, positions: int, dtype: torch.dtype, device: torch.device) -> Qwen3Target:
        """Load a checkpoint directory.

        Raises:
            CheckpointError: the checkpoint cannot be served.
        """
        config = read_target_config(directory)
        return cls(config, load_target_weights(directory, config, dtype, device), positions)

    def new_cache(self) -> SlotCache:
        """An empty K/V cache of this model's shape."""
        return new_cache(self.config, self.embedding)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed int64 [n]: [n, hidden]."""
        return F.embedding(tokens, self.embedding)

    def forward(
        self, tokens: Tensor, rows: Rows, cache: SlotCache, capture: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows through all layers, writing their K/V.

        Args:
            tokens: int64 [n].
            rows: where they stand.
            cache: K/V of all slots.
            capture: layers whose outputs are wanted, counted from 0.

        Returns:
            Last hidden states [n, hidden], for `logits`; and the captured ones side by side,
            [n, len(capture) * hidden], or None.
        """
        x, captured = self._stack.forward(self.embed(tokens), rows, cache, capture)
        return x, torch.cat(captured, dim=1) if captured else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of hidden states [n, hidden]: [n, vocabulary]."""
        return self._head(self._norm(hidden))


def new_cache(config: ModelConfig, like: Tensor) -> SlotCache:
    """An empty K/V cache of a model's shape, with the dtype and device of a tensor."""
    return SlotCache(
        config.num_hidden_layers, config.num_key_value_heads, config.head_dim, like.dtype, like.device
    )
