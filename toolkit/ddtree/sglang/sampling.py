"""The target's token after each row of a verification, greedy or drawn.

Drawing the target's own sample at every node and walking along the matches is exact for any tree: accepted
tokens are the target's, the tree only tells how far they were foreseen. Accepting a drafted token with
probability min(1, p/q) is biased on trees that hold the drafter's best candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def target_tokens(logits: Tensor, info: Any, width: int, out: Tensor | None = None) -> Tensor:
    """Choose a token in each row; changes `logits`. No synchronisation with the host.

    Args:
        logits: [R * W, vocabulary], the target's.
        info: SGLang's `SamplingBatchInfo`, R requests; None is greedy.
        width: W, rows a request.
        out: int64 [R, W], contiguous, where they go; None: a new tensor.

    Returns:
        int64 [R, W].
    """
    if info is not None and info.logit_bias is not None:
        logits.view(-1, width, logits.shape[-1]).add_(info.logit_bias.unsqueeze(1))
    if out is None:
        out = torch.empty((len(logits) // width, width), dtype=torch.int64, device=logits.device)
    greedy = torch.argmax(logits, -1, out=out.view(-1))
    if info is None or info.is_all_greedy:
        return out
    weights = _weights(logits, info, width)
    # The largest of p / e with e drawn from Exp(1) is a draw from p: the Gumbel-max trick without logarithms.
    noise = torch.empty_like(weights).exponential_(1.0).clamp_min_(torch.finfo(torch.float32).tiny)
    drawn = weights.div_(noise).argmax(-1)
    greedy.copy_(torch.where(_rows(info.top_ks, width) == 1, greedy, drawn))
    return out


def _weights(logits: Tensor, info: Any, width: int) -> Tensor:
    """Probabilities, float32 [R * W, vocabulary], 0 where top-k, top-p or min-p leaves a token out.

    Each filter judges the whole distribution, as SGLang's plain sampling does.
    """
    probabilities = torch.softmax(logits.float() / _rows(info.temperatures, width).unsqueeze(1), dim=-1)
    kept = probabilities
    if info.need_min_p_sampling:
        floor = probabilities.amax(-1, keepdim=True) * _rows(info.min_ps, width).unsqueeze(1)
        kept = probabilities.masked_fill(probabilities < floor, 0.0)
    if not (info.need_top_k_sampling or info.need_top_p_sampling):
        return kept
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    cut = rank >= _rows(info.top_ks, width).unsqueeze(1)
    cut |= (ordered.cumsum(-1) - ordered) > _rows(info.top_ps, width).unsqueeze(1)
    return kept.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), 0.0)


def _rows(values: Tensor, width: int) -> Tensor:
    """One value a row of values of requests, [R] or [R, 1] -> [R * W]."""
    return values.reshape(-1, 1).expand(-1, width).reshape(-1)
