"""The DFlash drafter: one forward proposes a block of tokens (arXiv 2602.06036; z-lab's public layout).

The context of position p is hidden_norm(fc(outputs of the target's chosen layers at p)); each drafter layer
projects it to K/V with its own weights. A block stands at positions s .. s + block_size - 1: the bonus
token, then mask tokens. Its rows see the whole context 0 .. s - 1 and each other in both directions. Slot i
gives the marginal of the token at s + i.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from toolkit.ddtree.cache import SlotCache
from toolkit.ddtree.models.config import DrafterConfig, read_drafter_config
from toolkit.ddtree.models.context import ContextProjection
from toolkit.ddtree.models.heads import Norm, scaled
from toolkit.ddtree.models.layers import DecoderStack, Rows
from toolkit.ddtree.models.linear import Linear
from toolkit.ddtree.models.loading import check_pair, load_drafter_weights, load_transition
from toolkit.ddtree.models.qwen3 import Qwen3Target, new_cache
from toolkit.ddtree.transition import TransitionTable


class DFlashDrafter:
    """Drafter of one target, whose embedding and head it shares.

    Args:
        config: its shape and block.
        weights: its tensors under their names in the checkpoint.
        target: the target.
        block_size: slots of a block, at most the config's; None takes that.
        transition: its transition table, if it has one.

    Raises:
        ValueError: the block is longer than the drafter was made for, or has no slot to draft.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        target: Qwen3Target,
        block_size: int | None,
        transition: TransitionTable | None = None,
    ) -> None:
        self.config = config
        self.transition = transition
        self.block_size = config.block_size if block_size is None else block_size
        if not 2 <= self.block_size <= config.block_size:
            raise ValueError(f"block size {block_size} is outside 2..{config.block_size}, the drafter's own")
        self._target = target
        model = config.model
        device = target.embedding.device
        self._stack = DecoderStack(weights, "layers.", model, target.positions, device)
        self._context = ContextProjection(weights, model, self._stack.rope)
        self._norm = Norm(model.hidden_size, model.rms_norm_eps, device)
        self.head = Linear(scaled(target.head_weight, weights["norm.weight"]))

    @classmethod
    def load(cls, directory: Path, target: Qwen3Target, block_size: int | None = None) -> DFlashDrafter:
        """Load a checkpoint directory and check that it fits the target.

        Raises:
            CheckpointError: the checkpoint cannot be served with this target.
            ValueError: see the class.
        """
        config = read_drafter_config(directory)
        check_pair(target.config, config, directory)
        device = target.embedding.device
        weights = load_drafter_weights(directory, config, target.embedding.dtype, device)
        return cls(config, weights, target, block_size, load_transition(directory, config, device))

    def new_cache(self) -> SlotCache:
        """An empty cache for the context's K/V."""
        return new_cache(self.config.model, self._target.embedding)

    def extend_context(self, hidden: Tensor, positions: Tensor, slots: Tensor, cache: SlotCache) -> None:
        """Append committed positions to the context.

        Args:
            hidden: [n, layers * hidden], the target's captured outputs at those positions.
            positions: int64 [n].
            slots: int64 [n], cache rows to write.
            cache: the context's K/V.
        """
        self._context.write(hidden, positions, slots, cache)

    def block(self, bonus: Tensor) -> Tensor:
        """Tokens of the draft block: the bonus token int64 [R], then mask tokens; int64 [R * block_size]."""
        tokens = bonus.new_full((bonus.shape[0], self.block_size), self.config.mask_token_id)
        tokens[:, 0] = bonus
        return tokens.flatten()

    def draft(self, block: Tensor, rows: Rows, cache: SlotCache) -> Tensor:
        """Propose the slots after the bonus token.

        Args:
            block: int64 [R * block_size], see `block`.
            rows: where the block stands; its K/V rows follow the context and are overwritten by it later.
            cache: the context's K/V.

        Returns:
            Logits [R, block_size - 1, vocabulary].
        """
        x, _ = self._stack.forward(self._target.embed(block), rows, cache)
        requests, count = rows.requests, self.block_size - 1
        drafted = x.view(requests, self.block_size, -1)[:, 1:].reshape(requests * count, -1)
        return self.head(self._norm(drafted)).view(requests, count, -1)
