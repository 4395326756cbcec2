"""Draft trees of a batch, as fixed-shape tensors: candidates, build, ancestor mask, positions.

R requests, S draft slots (block size - 1), K candidates a slot, N the largest budget. Entry 0 of every tree
is the root, which holds the bonus token; entries 1 .. N are nodes in tree order and, after them, padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toolkit.ddtree.policies import Children, Node, expand
from toolkit.ddtree.transition import RankedChildren
from toolkit.ddtree.types import Expansion, TreeLimits

EXPANSION_CODES: dict[Expansion, int] = {
    Expansion.CHAIN: 0,
    Expansion.BEST_FIRST: 1,
    Expansion.CHAIN_SEEDED: 2,
    Expansion.TRANSITION: 3,
}
_EXPANSIONS = {code: expansion for expansion, code in EXPANSION_CODES.items()}
_ORDERED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Tree limits of a batch, one entry a request, on the device that builds the trees.

    Attributes:
        budget: int32 [R], nodes without the root.
        topk_cap: int32 [R].
        expansion: int32 [R], values of `EXPANSION_CODES`.
    """

    budget: Tensor
    topk_cap: Tensor
    expansion: Tensor

    @classmethod
    def of(cls, limits: Sequence[TreeLimits], device: torch.device | str = "cpu") -> BatchLimits:
        """Gather the limits of requests, in batch order."""
        columns = zip(*((x.budget, x.topk_cap, EXPANSION_CODES[x.expansion]) for x in limits), strict=True)
        return cls(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))

    def rows(self) -> list[TreeLimits]:
        """The limits as one value a request."""
        columns = (self.budget.tolist(), self.topk_cap.tolist(), self.expansion.tolist())
        return [TreeLimits(b, c, _EXPANSIONS[e]) for b, c, e in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """Draft trees of a batch.

    A node precedes its children. Root and padding are their own parents and have depth 0, so that following
    `parents` never leaves the tree. Padding holds the root's token, rank -1 and score -inf.

    Attributes:
        tokens: int64 [R, N+1].
        parents: int64 [R, N+1], index of the parent.
        depths: int64 [R, N+1], distance from the root.
        ranks: int64 [R, N+1], rank of the node among its slot's candidates; -1 for root and padding.
        scores: float32 [R, N+1], log-probability of the path, re-scored where the policy does so; 0 for the
            root, -inf for padding.
        valid: bool [R, N+1], False for padding.
        counts: int64 [R], nodes without root and padding.
        max_depth: S, the deepest a node can be.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    scores: Tensor
    valid: Tensor
    counts: Tensor
    max_depth: int


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row and their log-probabilities.

    Logits are ranked in their own dtype, as an argmax would; equal logits go by token id, lowest first. The
    log-probability is logit - logsumexp(logits) in float32, at most 0. A row with NaN or +inf gives NaN.

    Args:
        logits: [..., V], float32, bfloat16 or float16.
        k: candidates, 1 .. V.

    Returns:
        log-probabilities float32 [..., k], falling, and tokens int64 [..., k].

    Raises:
        ValueError: k is out of range, or the dtype is another.
    """
    vocabulary = logits.shape[-1]
    if not 1 <= k <= vocabulary:
        raise ValueError(f"top-k {k} is outside 1..{vocabulary}, the vocabulary")
    if logits.dtype not in _ORDERED_DTYPES:
        raise ValueError(f"logits are {logits.dtype}; give float32, bfloat16 or float16")
    wide = logits.float()
    values, tokens = torch.topk(wide, min(k + 1, vocabulary), dim=-1)
    tokens = tokens[..., :k]
    if not bool((values[..., 1:] < values[..., :-1]).all()):  # else no two of the best are equal, nor NaN
        tokens = _best_in_order(wide, values[..., k - 1 : k], tokens)
    return torch.log_softmax(wide, dim=-1).gather(-1, tokens), tokens


def _best_in_order(logits: Tensor, least: Tensor, tokens: Tensor) -> Tensor:
    """The k best tokens of each row where some are equal or NaN, given k of the best and the k-th value."""
    vocabulary, k = logits.shape[-1], tokens.shape[-1]
    if bool(((logits < least).sum(-1) == vocabulary - k).all()):
        tokens = tokens.sort(dim=-1).values
        return tokens.gather(-1, logits.gather(-1, tokens).argsort(dim=-1, descending=True, stable=True))
    keys = _order_key(logits) - torch.arange(vocabulary, device=logits.device)
    return torch.topk(keys, k, dim=-1).indices


def build_trees(
    logprobs: Tensor,
    tokens: Tensor,
    root_tokens: Tensor,
    limits: BatchLimits,
    max_budget: int,
    children: RankedChildren | None = None,
) -> DraftTrees:
    """Build the draft tree of every request; the plain reference of the Triton kernel, and the CPU's builder.

    Args:
        logprobs: float32 [R, S, K], as `topk_logprobs` gives them; -inf or NaN ends a slot's candidates.
        tokens: int [R, S, K], distinct within a slot.
        root_tokens: int [R], the bonus tokens.
        limits: limits of each request.
        max_budget: N, which fixes the shapes.
        children: the candidates re-scored under the same caps, for requests of the policy `transition`.

    Returns:
        The trees, on the device of `tokens`.

    Raises:
        ValueError: a budget is above `max_budget`, or `policies.expand` refuses a request's limits.
    """
    return grow_trees(logprobs, tokens, root_tokens, limits.rows(), max_budget, children)


def grow_trees(
    logprobs: Tensor,
    tokens: Tensor,
    root_tokens: Tensor,
    limits: Sequence[TreeLimits],
    max_budget: int,
    children: RankedChildren | None = None,
) -> DraftTrees:
    """`build_trees` with the limits of each request as one value."""
    columns: list[list[list[int]]] = [[], [], [], []]
    scores, counts = [], []
    rescored = [None] * len(limits) if children is None else _children_rows(children)
    for logprob, candidate, root, limit, ranked in zip(
        logprobs.tolist(), tokens.tolist(), root_tokens.tolist(), limits, rescored, strict=True
    ):
        if limit.budget > max_budget:
            raise ValueError(f"tree budget {limit.budget} is above the batch's {max_budget}")
        nodes = expand(logprob, limit, ranked)
        padding = max_budget - len(nodes)
        for column, values in zip(columns, _tree_row(nodes, candidate, root, padding), strict=True):
            column.append(values)
        scores.append([0.0, *[node.score for node in nodes], *[-inf] * padding])
        counts.append(len(nodes))
    drafted, parents, depths, ranks = _tensor(columns, np.int64, tokens.device)
    score, count = _tensor(scores, np.float32, tokens.device), _tensor(counts, np.int64, tokens.device)
    return DraftTrees(drafted, parents, depths, ranks, score, score > -inf, count, max_depth=tokens.shape[1])


def _children_rows(children: RankedChildren) -> list[Children | None]:
    """What `policies.expand` takes of each request."""
    rows = zip(children.logprobs.tolist(), children.ranks.tolist(), strict=True)
    return [Children(*row) for row in rows]


def _tensor(values: Sequence[Any], dtype: npt.DTypeLike, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype)).to(device)  # faster than torch.tensor


def ancestor_mask(trees: DraftTrees) -> Tensor:
    """Who sees whom: bool [R, N+1, N+1], True where the column is an ancestor of the row, or the row itself.

    Padding sees only itself, and nothing sees padding.
    """
    if trees.parents.device.type == "cpu":
        return _ancestors_on_host(trees.parents.tolist())
    return _ancestors_on_device(trees)


def _ancestors_on_host(parents: list[list[int]]) -> Tensor:
    """`ancestor_mask` by one integer of bits a node, its parent's and its own."""
    requests, count = len(parents), len(parents[0])
    width = -(-count // 8)
    packed = bytearray()
    for row in parents:
        seen: list[int] = []
        for node, parent in enumerate(row):
            seen.append((seen[parent] if parent < node else 0) | 1 << node)
            packed += seen[node].to_bytes(width, "little")
    words = np.frombuffer(packed, dtype=np.uint8).reshape(requests, count, width)
    return torch.from_numpy(np.unpackbits(words, axis=2, count=count, bitorder="little").view(np.bool_))


def _ancestors_on_device(trees: DraftTrees) -> Tensor:
    """`ancestor_mask` in tensor operations of fixed shape."""
    requests, count = trees.parents.shape
    mask = torch.eye(count, dtype=torch.bool, device=trees.parents.device).repeat(requests, 1, 1)
    ancestors = trees.parents
    for _ in range(trees.max_depth):
        mask.scatter_(2, ancestors.unsqueeze(2), True)
        ancestors = trees.parents.gather(1, ancestors)
    return mask


def positions(trees: DraftTrees, seq_lens: Tensor) -> Tensor:
    """Positions of root and nodes, int64 [R, N+1]: the root's is its request's committed length, int [R]."""
    return seq_lens.to(torch.int64).unsqueeze(1) + trees.depths


def _tree_row(
    nodes: list[Node], candidates: list[list[int]], root: int, padding: int
) -> tuple[list[int], ...]:
    """Token, parent, depth and rank of root, nodes and padding of one tree."""
    first = len(nodes) + 1
    return (
        [root, *[candidates[node.depth - 1][node.rank] for node in nodes], *[root] * padding],
        [0, *[node.parent for node in nodes], *range(first, first + padding)],
        [0, *[node.depth for node in nodes], *[0] * padding],
        [-1, *[node.rank for node in nodes], *[-1] * padding],
    )


def _order_key(values: Tensor) -> Tensor:
    """Integers, int64, that order as float32 values do, spaced 2**32 apart; NaN is above every number."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFF_FFFF) - 1) << 32
