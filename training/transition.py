"""Training of a transition table: what the token before a candidate adds to the drafter's marginal.

The table is fitted beside the drafter, whose logits it takes as they are: it learns the factors that make
``softmax(logits_d + strength_d * left[a] . right)`` the distribution of the token of slot d given the token a
before it. Counting pairs of tokens gives a table, too, but in that one what the drafter foresees anyway
counts twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

RANK = 80


class Transition(nn.Module):
    """Factors of the table, and how much it counts in each slot.

    Args:
        vocab: Tokens.
        slots: Slots that a block drafts.
        rank: Length of the factors.
    """

    def __init__(self, vocab: int, slots: int, rank: int = RANK) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(vocab, rank) * 0.1)
        self.right = nn.Parameter(torch.randn(vocab, rank) * 0.1)
        self.strengths = nn.Parameter(torch.ones(slots))

    def forward(self, logits: Tensor, before: Tensor) -> Tensor:
        """Correct logits by the token before.

        Args:
            logits: Float32 [..., slots, vocab].
            before: Token before each slot, int64 [..., slots].

        Returns:
            [..., slots, vocab].
        """
        with torch.autocast(logits.device.type, enabled=False):
            return logits + (functional.embedding(before, self.left) * self.strengths[:, None]) @ self.right.T

    def exported(self) -> dict[str, Tensor]:
        """Tensors of the checkpoint: int8 factors with a float16 scale a token, and strengths of at most one.

        Factors twice as long in half the bits each tell more than short ones in float16.
        """
        greatest = self.strengths.detach().abs().max()
        tensors = {"strengths": self.strengths.detach() / greatest}
        for name, factor in (("left", self.left), ("right", self.right)):
            values = factor.detach() * greatest.sqrt()
            scale = (values.abs().amax(1).clamp(min=1e-6) / 127).half()
            tensors[name] = (values / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
        return tensors
