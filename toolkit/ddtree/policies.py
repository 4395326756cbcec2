"""Tree policies: which prefixes of the drafter's candidates become nodes of one request's draft tree.

The drafter proposes, for each of S slots, K candidates in falling probability. Under the product of these
marginals the expected number of accepted tokens of a tree is the sum of its nodes' path probabilities, so the
best tree of B nodes is the B most probable prefixes (DDTree, Ringel & Romano, arXiv 2604.12989).

The marginal of a slot does not know which token stands before it. `transition` therefore scores each
candidate once for every candidate of the slot before it (see `toolkit.ddtree.transition`); the rest is
best-first search, only that every parent has an order of children of its own.

One order rules every policy: score falling, then depth, then the parent's index, then the place among the
parent's children, which is the candidate's rank unless the policy re-scores. The score of a node is the
float32 sum of the log-probabilities on its path, added from the root outwards.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from toolkit.ddtree.types import Expansion, TreeLimits

_Candidates = Sequence[Sequence[float]]
_Table = Sequence[Sequence[Sequence[float]]]


class Children(NamedTuple):
    """Candidates of one request re-scored by the one before them, in falling order for each.

    Attributes:
        logprobs: float32 [S][K][K], at most 0: slot, rank of the candidate before (0 in the first slot, whose
            predecessor is the root), place among its children. -inf is no candidate, nor is any after it.
        ranks: [S][K][K], the drafter's rank of each child.
    """

    logprobs: _Table
    ranks: Sequence[Sequence[Sequence[int]]]


class Node(NamedTuple):
    """A node of a draft tree.

    Attributes:
        parent: index of the parent in the tree; 0 is the root.
        depth: distance from the root, 1 for its children.
        rank: which of its slot's candidates it is, 0 the most probable.
        score: log-probability of the path from the root, re-scored by `transition`.
    """

    parent: int
    depth: int
    rank: int
    score: float


def expand(logprobs: _Candidates, limits: TreeLimits, children: Children | None = None) -> list[Node]:
    """Choose the nodes of one tree, without its root, in tree order: a parent always precedes its children.

    Args:
        logprobs: float32 log-probabilities [S][K], at most 0, falling along each slot. A candidate at -inf
            (or NaN) is not offered, nor is any after it in its slot.
        limits: budget, cap and policy of the tree. A cap above K means K.
        children: what `transition` goes by, made with the same cap; other policies ignore it.

    Returns:
        At most `limits.budget` nodes; fewer when the candidates do not give that many.

    Raises:
        ValueError: the budget is negative, the cap is below 1, or `transition` was given no children.
    """
    if limits.budget < 0:
        raise ValueError(f"tree budget {limits.budget} is negative; give the nodes without the root")
    if limits.topk_cap < 1:
        raise ValueError(f"top-k cap {limits.topk_cap} offers no candidate; give at least 1")
    if limits.expansion is Expansion.TRANSITION:
        if children is None:
            raise ValueError("expansion transition needs the candidates re-scored by a transition table")
        return _transition(children, limits.budget)
    return _POLICIES[limits.expansion](logprobs, limits.budget, limits.topk_cap)


def _chain(logprobs: _Candidates, budget: int, cap: int) -> list[Node]:
    """The most probable candidate of every slot: linear DFlash as a tree. `cap` has no say."""
    del cap
    nodes: list[Node] = []
    score = 0.0
    for depth, slot in enumerate(logprobs[:budget], start=1):
        score = _add(score, slot[0])
        if not score > -inf:
            break
        nodes.append(Node(depth - 1, depth, 0, score))
    return nodes


def _best_first(logprobs: _Candidates, budget: int, cap: int) -> list[Node]:
    """The `budget` most probable prefixes."""
    return _grow([], logprobs, budget, cap)


def _chain_seeded(logprobs: _Candidates, budget: int, cap: int) -> list[Node]:
    """The greedy chain first, then the most probable of the other prefixes."""
    return _grow(_chain(logprobs, budget, 1), logprobs, budget, cap)


def _transition(children: Children, budget: int) -> list[Node]:
    """The `budget` most probable prefixes where a candidate's probability depends on the one before it."""
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, float, int]] = []

    def offer(parent: int, parent_score: float, depth: int, above: int, place: int) -> None:
        if depth <= len(children.logprobs) and place < len(children.logprobs[depth - 1][above]):
            score = _add(parent_score, children.logprobs[depth - 1][above][place])
            if score > -inf:
                heapq.heappush(heap, (-score, depth, parent, place, parent_score, above))

    offer(0, 0.0, 1, 0, 0)
    while heap and len(nodes) < budget:
        negative, depth, parent, place, parent_score, above = heapq.heappop(heap)
        rank = children.ranks[depth - 1][above][place]
        nodes.append(Node(parent, depth, rank, -negative))
        offer(parent, parent_score, depth, above, place + 1)
        offer(len(nodes), -negative, depth + 1, rank, 0)
    return nodes


_POLICIES: dict[Expansion, Callable[[_Candidates, int, int], list[Node]]] = {
    Expansion.CHAIN: _chain,
    Expansion.BEST_FIRST: _best_first,
    Expansion.CHAIN_SEEDED: _chain_seeded,
}


def _grow(seed: list[Node], logprobs: _Candidates, budget: int, cap: int) -> list[Node]:
    """Add the best prefixes to `seed`, a chain of rank-0 nodes, until the budget is spent.

    A prefix waits on the heap only when its better sibling or, for rank 0, its parent is in the tree: each
    node taken offers its next sibling and its first child. Heap entries compare in the tree's order.
    """
    nodes = list(seed)
    slots = len(logprobs)
    ranks = min(cap, len(logprobs[0])) if slots else 0
    heap: list[tuple[float, int, int, int, float]] = []

    def offer(parent: int, parent_score: float, depth: int, rank: int) -> None:
        if depth <= slots and rank < ranks:
            score = _add(parent_score, logprobs[depth - 1][rank])
            if score > -inf:
                heapq.heappush(heap, (-score, depth, parent, rank, parent_score))

    if not nodes:
        offer(0, 0.0, 1, 0)
    else:
        offer(0, 0.0, 1, 1)
        for above, below in pairwise(nodes):
            offer(below.parent, above.score, below.depth, 1)
    while heap and len(nodes) < budget:
        negative, depth, parent, rank, parent_score = heapq.heappop(heap)
        nodes.append(Node(parent, depth, rank, -negative))
        offer(parent, parent_score, depth, rank + 1)
        offer(len(nodes), -negative, depth + 1, 0)
    return nodes


def _add(left: float, right: float) -> float:
    """Float32 sum. Rounding a double's sum of two float32 once more to float32 is exact."""
    return ctypes.c_float(left + right).value
