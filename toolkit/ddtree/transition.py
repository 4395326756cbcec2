"""Path-conditioned re-scoring: how probable a candidate is after each candidate of the slot before it.

The drafter gives marginals: that of slot d does not know which token the tree has at d - 1. A transition
table says for every pair of tokens (a, b) how much more or less probable a makes b than the marginal knows.
It is a product of two short vectors: a vocabulary of 160,000 needs megabytes of it rather than gigabytes.

    score(b | a) = log p_d(b) + strength_d * left[a] . right[b]

over the candidates of slot d, normalised to one for each a. In the first slot a is the bonus token. The cap
counts the drafter's ranks before re-scoring, so one candidate a slot is still the greedy chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankedChildren:
    """Candidates of a batch re-scored by the one before them, in falling order for each.

    Attributes:
        logprobs: float32 [R, S, K, K], at most 0: slot, rank of the candidate before, place among its
            children; -inf where there is none. In the first slot, after the root, all rows are one.
        ranks: int64 [R, S, K, K], the drafter's rank of each child.
    """

    logprobs: Tensor
    ranks: Tensor


class TransitionTable:
    """Factors of a transition table.

    Args:
        left: float [V, r], of the token that stands before.
        right: float [V, r], of the token that stands after.
        strengths: float [S], by slot.
    """

    def __init__(self, left: Tensor, right: Tensor, strengths: Tensor) -> None:
        self._left = left.float()
        self._right = right.float()
        self._strengths = strengths.float().view(-1, 1, 1)

    @classmethod
    def quantised(cls, tensors: Mapping[str, Tensor], strengths: Tensor) -> TransitionTable:
        """From int8 factors `left` and `right` [V, r] and the scale of each token, `..._scale` float [V]."""
        left, right = (
            tensors[name].float() * tensors[f"{name}_scale"].float().unsqueeze(1)
            for name in ("left", "right")
        )
        return cls(left, right, strengths)

    @property
    def slots(self) -> int:
        """Slots that the table was made for; a block may draft fewer."""
        return len(self._strengths)

    def rank_children(
        self, logprobs: Tensor, tokens: Tensor, root_tokens: Tensor, topk_cap: Tensor
    ) -> RankedChildren:
        """Re-score the candidates of each slot once for each candidate before them. Needs no host.

        Args:
            logprobs: float32 [R, S, K], falling, as `tree.topk_logprobs` gives them; NaN is no candidate.
            tokens: int64 [R, S, K].
            root_tokens: int64 [R], the bonus tokens.
            topk_cap: int [R], how many ranks the slots of each request offer.
        """
        if tokens.device.type == "cpu":
            return self._rank_on_host(logprobs, tokens, root_tokens, topk_cap)
        return self._rank_on_device(logprobs, tokens, root_tokens, topk_cap)

    def _rank_on_device(
        self, logprobs: Tensor, tokens: Tensor, root_tokens: Tensor, topk_cap: Tensor
    ) -> RankedChildren:
        """`rank_children` in tensor operations of fixed shape."""
        ranks = tokens.shape[2]
        roots = root_tokens.view(-1, 1, 1).expand(-1, 1, ranks)
        before = torch.cat([roots, tokens[:, :-1]], dim=1)
        left = self._left[before] * self._strengths[: tokens.shape[1]]
        scores = logprobs.unsqueeze(2) + left @ self._right[tokens].mT
        offered = torch.arange(ranks, device=tokens.device) < topk_cap.view(-1, 1, 1, 1)
        scores = torch.where(offered & ~scores.isnan(), scores, -inf)
        scores = (scores - scores.logsumexp(-1, keepdim=True)).clamp(max=0)
        scores = torch.where(scores.isnan(), -inf, scores)  # a slot without candidates
        return RankedChildren(*scores.sort(dim=-1, descending=True, stable=True))

    def _rank_on_host(
        self, logprobs: Tensor, tokens: Tensor, root_tokens: Tensor, topk_cap: Tensor
    ) -> RankedChildren:
        """`rank_children` in numpy, which on a CPU takes a fraction of the time that small tensors do."""
        candidates = tokens.numpy()
        before = np.empty_like(candidates)
        before[:, 0] = root_tokens.numpy()[:, None]
        before[:, 1:] = candidates[:, :-1]
        left, right = self._left.numpy()[before], self._right.numpy()[candidates]
        left *= self._strengths.numpy()[: tokens.shape[1]]
        scores = left @ right.transpose(0, 1, 3, 2)
        scores += logprobs.numpy()[:, :, None]
        offered = np.arange(tokens.shape[2]) < topk_cap.numpy()[:, None, None, None]
        scores[~(offered & (scores > -inf))] = -inf  # no number, too
        peak = scores.max(-1, keepdims=True)
        peak[peak == -inf] = 0.0  # a slot without candidates
        total = np.exp(scores - peak).sum(-1, keepdims=True)
        total[total == 0.0] = 1.0
        scores -= peak + np.log(total)
        np.minimum(scores, 0.0, out=scores)
        order = np.argsort(-scores, axis=-1, kind="stable")
        ranked = np.take_along_axis(scores, order, -1)
        return RankedChildren(torch.from_numpy(ranked), torch.from_numpy(order))
