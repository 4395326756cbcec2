"""Draft trees on the GPU, one program a request, without a word to the host.

Level by level: the N best prefixes of depth d have their parents among the N best of depth d - 1. With
parents in order and candidates in order, prefix (parent i, rank j) has (i + 1)(j + 1) - 1 others before it,
so only pairs with (i + 1)(j + 1) <= N can be among the N best. Each level sorts these few pairs, and its N
best are merged into the tree's.

The policy `transition` orders the children of every parent anew. Then prefix (parent i, place j) is certain
to have before it only the i + 1 best parents and j siblings: pairs with i + j < N are sorted.

The plain reference is `toolkit.ddtree.tree.build_trees`, with `tree_links` below; from the same candidates
both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.ddtree.kernels.keys import (
    key_tie,
    key_value,
    largest_keys,
    largest_sort,
    merge_largest,
    pack_key,
    warps_for,
)
from toolkit.ddtree.transition import RankedChildren
from toolkit.ddtree.tree import EXPANSION_CODES, BatchLimits, DraftTrees, ancestor_mask
from toolkit.ddtree.types import Expansion

_CHAIN = tl.constexpr(EXPANSION_CODES[Expansion.CHAIN])
_CHAIN_SEEDED = tl.constexpr(EXPANSION_CODES[Expansion.CHAIN_SEEDED])
_SEED_KEY = tl.constexpr(0x7FFFFFFF << 32)
_NO_PAIR = tl.constexpr(0x7FFFFFFF)
_LINK_BLOCK = 32


@dataclass(frozen=True, slots=True)
class TreeLinks:
    """What verification kernels need beside the trees; W = ceil((N+1) / 64).

    Attributes:
        ancestors: int64 [R, N+1, W]; bit c % 64 of word c // 64 is set where c is an ancestor of the node, or
            the node itself. Padding sees only itself.
        first_child: int64 [R, N+1], the node's child of lowest index, -1 for none.
        next_sibling: int64 [R, N+1], the next node with the same parent, -1 for none.
    """

    ancestors: Tensor
    first_child: Tensor
    next_sibling: Tensor


def tree_links(trees: DraftTrees) -> TreeLinks:
    """The links of trees, in plain torch: the reference of the kernel."""
    requests, count = trees.parents.shape
    words = triton.cdiv(count, 64)
    bits = torch.nn.functional.pad(ancestor_mask(trees), (0, words * 64 - count))
    weights = torch.ones(64, dtype=torch.int64, device=bits.device) << torch.arange(64, device=bits.device)
    ancestors = (bits.view(requests, count, words, 64) * weights).sum(-1)

    index = torch.arange(count, device=bits.device)
    is_node = trees.valid & (index > 0)
    is_child = (trees.parents.unsqueeze(1) == index.view(1, -1, 1)) & is_node.unsqueeze(1)
    is_sibling = (trees.parents.unsqueeze(2) == trees.parents.unsqueeze(1)) & (index > index.unsqueeze(1))
    is_sibling = is_sibling & is_node.unsqueeze(1) & is_node.unsqueeze(2)
    return TreeLinks(ancestors, _first(is_child), _first(is_sibling))


def build_trees(
    logprobs: Tensor,
    tokens: Tensor,
    root_tokens: Tensor,
    limits: BatchLimits,
    max_budget: int,
    children: RankedChildren | None = None,
) -> tuple[DraftTrees, TreeLinks]:
    """Build the draft tree of every request, and its links. Budgets, caps and policies may differ by request.

    Capturable in a CUDA graph once it has run with the same shapes. Budgets are not checked against
    `max_budget`, which would need the host: a larger one gives `max_budget` nodes.

    Args:
        logprobs: float32 [R, S, K], contiguous, at most 0, falling in each slot; after -inf or NaN only such.
        tokens: int64 [R, S, K], contiguous.
        root_tokens: int64 [R], contiguous, the bonus tokens.
        limits: limits of each request, on the same device.
        max_budget: N, which fixes the shapes.
        children: the candidates re-scored under the same caps. A request of the policy `transition` needs
            them; without them, which only the host could notice, it gets best-first search.

    Returns:
        Trees and links.

    Raises:
        ValueError: `max_budget` nodes over K candidates need more shared memory than the device has.
    """
    requests, slots, ranks = logprobs.shape
    device = logprobs.device
    pairs, run = (
        _pairs(max_budget, ranks, device) if children is None else _all_pairs(max_budget, ranks, device)
    )
    n_pad, p_pad = _pad(max_budget), pairs.shape[0]
    if p_pad > largest_sort(device):
        raise ValueError(
            f"budget {max_budget} with {ranks} candidates sorts {p_pad} prefixes a depth; {device} fits "
            f"{largest_sort(device)}: lower the budget or the top-k cap"
        )
    count = max_budget + 1
    drafted, parents, depths, child_ranks = torch.empty(
        (4, requests, count), dtype=torch.int64, device=device
    )
    scores = torch.empty((requests, count), dtype=torch.float32, device=device)
    valid = torch.empty((requests, count), dtype=torch.bool, device=device)
    counts = torch.empty(requests, dtype=torch.int64, device=device)
    level_scores = torch.empty((requests, slots + 1, n_pad), dtype=torch.float32, device=device)
    level_pairs = torch.empty((requests, slots, n_pad), dtype=torch.int32, device=device)
    level_nodes, level_ranks = torch.empty_like(level_pairs), torch.empty_like(level_pairs)
    child_scores, child_order = (
        (logprobs, tokens) if children is None else _by_parent(logprobs, limits, children)
    )
    _grow_kernel[(requests,)](
        child_scores, child_order, tokens, root_tokens, limits.budget, limits.topk_cap, limits.expansion,
        pairs, level_scores, level_pairs, level_nodes, level_ranks,
        drafted, parents, depths, child_ranks, scores, valid, counts,
        slots, ranks, max_budget,
        N_PAD=n_pad, P_PAD=p_pad, RUN=run, BY_PARENT=children is not None, num_warps=warps_for(p_pad),
    )  # fmt: skip
    trees = DraftTrees(drafted, parents, depths, child_ranks, scores, valid, counts, slots)
    return trees, _link(trees)


@triton.jit
def _grow_kernel(
    p_logprob, p_order, p_candidate, p_root, p_budget, p_cap, p_expansion,
    p_pair, p_level_score, p_level_pair, p_level_node, p_level_rank,
    p_token, p_parent, p_depth, p_rank, p_score, p_valid, p_count,
    slots, ranks, max_budget,
    N_PAD: tl.constexpr, P_PAD: tl.constexpr, RUN: tl.constexpr, BY_PARENT: tl.constexpr,
):  # fmt: skip
    """One tree: score(parent, rank) = score(parent) + logprob(depth, rank), best N by depth, best N of all.

    Scratch of a request: level_score [S+1, N_PAD] (row 0 is the root's level), level_pair [S, N_PAD], and
    level_node [S, N_PAD], the tree index of the prefix at that place of its level.

    BY_PARENT: logprob and order are [S, K, K], the children of each rank in falling order, and the drafter's
    rank of each. A pair is then of a parent's place and a child's place; level_rank [S, N_PAD] has its rank.
    """
    i_request = tl.program_id(0).to(tl.int64)
    expansion = tl.load(p_expansion + i_request)
    budget = tl.minimum(tl.load(p_budget + i_request), max_budget)
    cap = tl.where(expansion == _CHAIN, 1, tl.load(p_cap + i_request))
    p_level_score += i_request * (slots + 1) * N_PAD
    p_level_pair += i_request * slots * N_PAD
    p_level_node += i_request * slots * N_PAD
    p_level_rank += i_request * slots * N_PAD
    stride = slots * ranks * ranks if BY_PARENT else slots * ranks
    p_logprob += i_request * stride
    p_order += i_request * stride
    p_candidate += i_request * slots * ranks

    o_place = tl.arange(0, N_PAD)
    o_rising = N_PAD - 1 - o_place
    b_pair = tl.load(p_pair + tl.arange(0, P_PAD))
    b_place = tl.where(b_pair < _NO_PAIR, b_pair // ranks, 0)
    b_rank = b_pair % ranks
    is_pair = (b_pair < _NO_PAIR) & (b_rank < cap)

    tl.store(p_level_score + o_place, tl.where(o_place == 0, 0.0, float("-inf")))
    b_tree = pack_key(tl.full([N_PAD], float("-inf"), tl.float32), slots * N_PAD + o_place)
    for i_level in range(slots):
        tl.debug_barrier()
        b_parent_score = tl.load(p_level_score + i_level * N_PAD + b_place)
        o_child = i_level * ranks + b_rank
        if BY_PARENT:
            p_above = p_level_rank + (i_level - 1) * N_PAD
            b_above = tl.load(p_above + b_place, mask=is_pair & (i_level > 0), other=0)
            o_child = (i_level * ranks + b_above) * ranks + b_rank
        b_logprob = tl.load(p_logprob + o_child)
        b_score = b_parent_score + b_logprob
        b_score = tl.where(is_pair & (b_score > float("-inf")), b_score, float("-inf"))
        b_level = largest_keys(pack_key(b_score, b_pair), N_PAD, RISING=True, SORTED=RUN)
        b_score = key_value(b_level)
        tl.store(p_level_score + (i_level + 1) * N_PAD + o_rising, b_score)
        b_chosen = key_tie(b_level).to(tl.int32)
        tl.store(p_level_pair + i_level * N_PAD + o_rising, b_chosen)
        if BY_PARENT:
            is_prefix = b_score > float("-inf")
            b_above = tl.load(p_above + b_chosen // ranks, mask=is_prefix & (i_level > 0), other=0)
            o_child = (i_level * ranks + b_above) * ranks + b_chosen % ranks
            b_child = tl.load(p_order + o_child, mask=is_prefix, other=0).to(tl.int32)
            tl.store(p_level_rank + i_level * N_PAD + o_rising, b_child)

        o_prefix = i_level * N_PAD + o_rising
        b_key = pack_key(b_score, o_prefix)
        is_seed = (expansion == _CHAIN_SEEDED) & (o_rising == 0) & (b_score > float("-inf"))
        b_key = tl.where(is_seed, _SEED_KEY | (0xFFFFFFFF - o_prefix.to(tl.int64)), b_key)
        b_tree = merge_largest(b_tree, b_key)

    o_node = o_place + 1
    o_prefix = tl.minimum(key_tie(b_tree), slots * N_PAD - 1).to(tl.int32)
    i_level = o_prefix // N_PAD
    tl.debug_barrier()
    b_score = tl.load(p_level_score + N_PAD + o_prefix)
    b_pair = tl.load(p_level_pair + o_prefix)
    is_node = (o_place < budget) & (key_value(b_tree) != float("-inf"))
    tl.store(p_level_node + o_prefix, o_node, mask=is_node)
    b_place = b_pair // ranks
    b_rank = tl.load(p_level_rank + o_prefix) if BY_PARENT else b_pair % ranks
    tl.debug_barrier()
    has_parent = is_node & (i_level > 0)
    b_parent = tl.load(p_level_node + (i_level - 1) * N_PAD + b_place, mask=has_parent, other=0)
    root = tl.load(p_root + i_request)
    b_token = tl.load(p_candidate + i_level * ranks + b_rank, mask=is_node, other=0)

    i_out = i_request * (max_budget + 1)
    o_out = i_out + o_node
    in_tree = o_place < max_budget
    tl.store(p_token + o_out, tl.where(is_node, b_token, root), mask=in_tree)
    tl.store(p_parent + o_out, tl.where(is_node, b_parent, o_node).to(tl.int64), mask=in_tree)
    tl.store(p_depth + o_out, tl.where(is_node, i_level + 1, 0).to(tl.int64), mask=in_tree)
    tl.store(p_rank + o_out, tl.where(is_node, b_rank, -1).to(tl.int64), mask=in_tree)
    tl.store(p_score + o_out, tl.where(is_node, b_score, float("-inf")), mask=in_tree)
    tl.store(p_valid + o_out, is_node, mask=in_tree)
    tl.store(p_token + i_out, root)
    tl.store(p_parent + i_out, tl.full([], 0, tl.int64))
    tl.store(p_depth + i_out, tl.full([], 0, tl.int64))
    tl.store(p_rank + i_out, tl.full([], -1, tl.int64))
    tl.store(p_score + i_out, 0.0)
    tl.store(p_valid + i_out, tl.full([], 1, tl.int1))
    tl.store(p_count + i_request, tl.sum(is_node.to(tl.int64), axis=0))


@triton.jit
def _link_kernel(
    p_parent, p_count, p_ancestors, p_first_child, p_next_sibling,
    count, max_depth, words,
    BLOCK: tl.constexpr, WORDS_PAD: tl.constexpr,
):  # fmt: skip
    """Links of BLOCK nodes of one tree."""
    i_request = tl.program_id(0).to(tl.int64)
    nodes = tl.load(p_count + i_request).to(tl.int32)
    p_parent += i_request * count
    o_node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_tree = o_node < count
    b_parent = tl.load(p_parent + o_node, mask=in_tree, other=0).to(tl.int32)

    o_word = tl.arange(0, WORDS_PAD)[None, :]
    b_ancestor = o_node.to(tl.int64)
    b_bits = tl.zeros([BLOCK, WORDS_PAD], tl.int64)
    for _ in range(max_depth + 1):
        b_bit = tl.full([BLOCK], 1, tl.int64) << (b_ancestor % 64)
        b_bits |= tl.where((b_ancestor // 64)[:, None] == o_word, b_bit[:, None], 0)
        b_ancestor = tl.load(p_parent + b_ancestor, mask=in_tree, other=0)
    o_bits = (i_request * count + o_node)[:, None] * words + o_word
    tl.store(p_ancestors + o_bits, b_bits, mask=in_tree[:, None] & (o_word < words))

    b_child = tl.zeros([BLOCK], tl.int32) + count
    b_sibling = tl.zeros([BLOCK], tl.int32) + count
    for i_other in range(1, count, BLOCK):
        o_other = i_other + tl.arange(0, BLOCK)
        is_other = o_other <= nodes
        b_other = tl.load(p_parent + o_other, mask=is_other, other=-1).to(tl.int32)
        is_child = b_other[None, :] == o_node[:, None]
        is_sibling = (b_other[None, :] == b_parent[:, None]) & (o_other[None, :] > o_node[:, None])
        is_sibling = is_sibling & (o_node > 0)[:, None] & (o_node <= nodes)[:, None]
        b_child = tl.minimum(b_child, tl.min(tl.where(is_child, o_other[None, :], count), axis=1))
        b_sibling = tl.minimum(b_sibling, tl.min(tl.where(is_sibling, o_other[None, :], count), axis=1))
    o_out = i_request * count + o_node
    tl.store(p_first_child + o_out, tl.where(b_child < count, b_child, -1).to(tl.int64), mask=in_tree)
    tl.store(p_next_sibling + o_out, tl.where(b_sibling < count, b_sibling, -1).to(tl.int64), mask=in_tree)


def _link(trees: DraftTrees) -> TreeLinks:
    requests, count = trees.parents.shape
    words = triton.cdiv(count, 64)
    links = TreeLinks(
        trees.parents.new_empty((requests, count, words)),
        torch.empty_like(trees.parents),
        torch.empty_like(trees.parents),
    )
    _link_kernel[(requests, triton.cdiv(count, _LINK_BLOCK))](
        trees.parents, trees.counts, links.ancestors, links.first_child, links.next_sibling,
        count, trees.max_depth, words,
        BLOCK=_LINK_BLOCK, WORDS_PAD=triton.next_power_of_2(words), num_warps=4,
    )  # fmt: skip
    return links


def _pad(budget: int) -> int:
    padded: int = triton.next_power_of_2(max(2, budget))
    return padded


@lru_cache(maxsize=64)
def _pairs(budget: int, ranks: int, device: torch.device) -> tuple[Tensor, int]:
    """The pairs of parent's place i and child's rank j that a level sorts, as i * ranks + j, int32 [P_PAD].

    The children of one rank are in order already. Cut into runs, falling and rising in turn, they leave only
    the last stages of the sort to do. Gives the runs' length, too: the largest that needs no longer list.
    """
    lengths = [budget // (rank + 1) for rank in range(min(ranks, budget))]
    size = max(_pad(budget), triton.next_power_of_2(sum(lengths)))
    run = _pad(budget)
    while run > 1 and run * sum(triton.cdiv(length, run) for length in lengths) > size:
        run //= 2
    table: list[int] = []
    for rank, length in enumerate(lengths):
        for start in range(0, length, run):
            pairs = [place * ranks + rank for place in range(start, min(start + run, length))]
            pairs += [_NO_PAIR.value] * (run - len(pairs))
            table += pairs if len(table) // run % 2 == 0 else pairs[::-1]
    table += [_NO_PAIR.value] * (size - len(table))
    return torch.tensor(table, dtype=torch.int32, device=device), run


@lru_cache(maxsize=64)
def _all_pairs(budget: int, ranks: int, device: torch.device) -> tuple[Tensor, int]:
    """`_pairs` where each parent has an order of children of its own."""
    table = [place * ranks + child for place in range(budget) for child in range(min(ranks, budget - place))]
    size = max(_pad(budget), triton.next_power_of_2(len(table)))
    table += [_NO_PAIR.value] * (size - len(table))
    return torch.tensor(table, dtype=torch.int32, device=device), 1


def _by_parent(logprobs: Tensor, limits: BatchLimits, children: RankedChildren) -> tuple[Tensor, Tensor]:
    """Children of every rank and the drafter's rank of each, [R, S, K, K]: re-scored, or by marginals."""
    rescored = (limits.expansion == EXPANSION_CODES[Expansion.TRANSITION]).view(-1, 1, 1, 1)
    by_rank = torch.arange(logprobs.shape[2], device=logprobs.device)
    return (
        torch.where(rescored, children.logprobs, logprobs.unsqueeze(2)),
        torch.where(rescored, children.ranks, by_rank),
    )


def _first(flags: Tensor) -> Tensor:
    """Index of the first True along the last dimension, -1 for none."""
    return torch.where(flags.any(-1), flags.to(torch.int8).argmax(-1), -1)
