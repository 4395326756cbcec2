"""Penalties at the nodes of draft trees, and the count of output tokens that they go by.

R requests, W rows each (root, nodes, padding), V tokens, P rows of penalised requests. The tokens on a node's
path count as output there. The plain twin is in tests/sglang/test_penalties.py, as a loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from toolkit.ddtree.tree import DraftTrees

_TILE = 1024


@dataclass(slots=True)
class PenaltyTable:
    """What is known of penalised requests, a row each.

    Attributes:
        counts: int32 [P, V], how often each token was output.
        settings: float32 [P, 3], frequency, presence and repetition penalty.
        lengths: int32 [P, 2], tokens output so far, and how many there must be before a stop token.
        stops: int32 [P, n], tokens held back until then, padded with -1.
    """

    counts: Tensor
    settings: Tensor
    lengths: Tensor
    stops: Tensor


def penalise(logits: Tensor, rows: Tensor, table: PenaltyTable, trees: DraftTrees) -> None:
    """Change the logits after root and nodes in place: frequency and presence, repetition, held-back tokens.

    logit - frequency * count - presence * (count > 0); then, where count > 0, divided by the repetition
    penalty if positive, else multiplied by it; then -inf for stop tokens of a text that is too short.

    Args:
        logits: [R * W, V]; rows may be further apart than V.
        rows: int32 [R], the request's row of the table, -1 for none.
        table: of penalised requests.
        trees: the trees; their roots are counted already.
    """
    requests, width = trees.tokens.shape
    vocabulary = table.counts.shape[1]
    _penalise_kernel[(requests * width, triton.cdiv(vocabulary, _TILE))](
        logits, rows, table.counts, table.settings, table.lengths, table.stops,
        trees.tokens, trees.parents, trees.depths,
        width, vocabulary, logits.stride(0), table.stops.shape[1], trees.max_depth,
        TILE=_TILE, num_warps=4,
    )  # fmt: skip


def count_tokens(rows: Tensor, tokens: Tensor, lengths: Tensor, table: PenaltyTable) -> None:
    """Count committed tokens.

    Args:
        rows: int32 [R], the request's row of the table, -1 for none.
        tokens: int64 [R, D], contiguous.
        lengths: int32 [R], how many of them.
        table: of penalised requests; changed in place.
    """
    requests, depths = tokens.shape
    _count_kernel[(requests,)](
        rows, tokens, lengths, table.counts, table.lengths, table.counts.shape[1], depths,
        DEPTHS_PAD=triton.next_power_of_2(depths), num_warps=1,
    )  # fmt: skip


@triton.jit
def _penalise_kernel(
    p_logit, p_row, p_count, p_setting, p_length, p_stop, p_token, p_parent, p_depth,
    width, vocabulary, stride, stops, max_depth,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one node's logits."""
    i_node = tl.program_id(0).to(tl.int64)
    i_request = i_node // width
    row = tl.load(p_row + i_request).to(tl.int64)
    if row >= 0:
        o_token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        is_token = o_token < vocabulary
        b_count = tl.load(p_count + row * vocabulary + o_token, mask=is_token, other=0)
        node = i_node % width
        for _ in range(max_depth):
            token = tl.load(p_token + i_request * width + node)
            b_count += ((o_token == token) & (node > 0)).to(tl.int32)
            # Padding is its own parent; what its rows hold does not matter.
            node = tl.load(p_parent + i_request * width + node)

        frequency = tl.load(p_setting + row * 3)
        presence = tl.load(p_setting + row * 3 + 1)
        repetition = tl.load(p_setting + row * 3 + 2)
        p_out = p_logit + i_node * stride + o_token
        b_logit = tl.load(p_out, mask=is_token, other=0.0).to(tl.float32)
        is_seen = b_count > 0
        b_logit -= frequency * b_count.to(tl.float32) + tl.where(is_seen, presence, 0.0)
        b_scaled = tl.where(b_logit < 0, b_logit * repetition, b_logit / repetition)
        b_logit = tl.where(is_seen, b_scaled, b_logit)
        produced = tl.load(p_length + row * 2) + tl.load(p_depth + i_node).to(tl.int32)
        if produced < tl.load(p_length + row * 2 + 1):
            for i_stop in range(stops):
                held = tl.load(p_stop + row * stops + i_stop)
                b_logit = tl.where(o_token == held, float("-inf"), b_logit)
        tl.store(p_out, b_logit, mask=is_token)


@triton.jit
def _count_kernel(
    p_row, p_token, p_committed, p_count, p_length, vocabulary, depths,
    DEPTHS_PAD: tl.constexpr,
):  # fmt: skip
    """Committed tokens of one request."""
    i_request = tl.program_id(0).to(tl.int64)
    row = tl.load(p_row + i_request).to(tl.int64)
    if row >= 0:
        committed = tl.load(p_committed + i_request)
        o_depth = tl.arange(0, DEPTHS_PAD)
        is_here = o_depth < committed
        b_token = tl.load(p_token + i_request * depths + o_depth, mask=is_here, other=0)
        tl.atomic_add(p_count + row * vocabulary + b_token, 1, mask=is_here)
        tl.store(p_length + row * 2, tl.load(p_length + row * 2) + committed)
