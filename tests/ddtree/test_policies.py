"""Tree policies against brute force, and what they promise beyond the choice of nodes."""

from itertools import product
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.ddtree.policies import Node, expand
from toolkit.ddtree.types import Expansion, TreeLimits

MARGINAL = [expansion for expansion in Expansion if expansion is not Expansion.TRANSITION]


def prefixes(logprobs, cap):
    """Every prefix as (ranks, float32 score), in the tree's order; -inf is no candidate."""
    scores = {(): np.float32(0)}
    for depth in range(1, len(logprobs) + 1):
        for ranks in product(range(min(cap, len(logprobs[0]))), repeat=depth):
            if ranks[:-1] in scores:
                score = np.float32(scores[ranks[:-1]] + np.float32(logprobs[depth - 1][ranks[-1]]))
                if score > -inf:
                    scores[ranks] = score

    def order(ranks):
        return (-scores[ranks], len(ranks), order(ranks[:-1]), ranks[-1]) if ranks else ()

    return [(ranks, float(scores[ranks])) for ranks in sorted(scores, key=order) if ranks]


def as_prefixes(nodes: list[Node]):
    paths = [()]
    for node in nodes:
        paths.append((*paths[node.parent], node.rank))
    return [(path, node.score) for path, node in zip(paths[1:], nodes, strict=True)]


@st.composite
def slots(draw, coarse=False):
    """Falling float32 log-probabilities [S][K]; coarse ones tie often, some end in -inf."""
    count, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = (
        st.sampled_from([0.0, -0.5, -1.0, -1.5, -inf])
        if coarse
        else st.floats(-8, 0, width=32, allow_nan=False)
    )
    return [sorted(draw(st.lists(value, min_size=ranks, max_size=ranks)), reverse=True) for _ in range(count)]


any_slots = st.one_of(slots(), slots(coarse=True))


@settings(max_examples=150, deadline=None)
@given(any_slots, st.integers(0, 60), st.integers(1, 5))
def test_best_first_is_the_most_probable_prefixes(logprobs, budget, cap):
    nodes = expand(logprobs, TreeLimits(budget, cap))
    assert as_prefixes(nodes) == prefixes(logprobs, cap)[:budget]


@settings(max_examples=150, deadline=None)
@given(any_slots, st.integers(0, 60), st.integers(1, 5))
def test_chain_seeded_is_the_chain_and_then_the_most_probable_others(logprobs, budget, cap):
    nodes = expand(logprobs, TreeLimits(budget, cap, Expansion.CHAIN_SEEDED))
    chain = as_prefixes(expand(logprobs, TreeLimits(budget, cap, Expansion.CHAIN)))
    rest = [prefix for prefix in prefixes(logprobs, cap) if prefix not in chain]
    assert as_prefixes(nodes) == [*chain, *rest][:budget]


@settings(max_examples=100, deadline=None)
@given(any_slots, st.integers(0, 60), st.integers(1, 5), st.sampled_from(MARGINAL))
def test_trees_are_closed_under_parents(logprobs, budget, cap, expansion):
    nodes = expand(logprobs, TreeLimits(budget, cap, expansion))
    depths = [0, *(node.depth for node in nodes)]
    assert len(nodes) <= budget
    for index, node in enumerate(nodes, start=1):
        assert node.parent < index
        assert node.depth == depths[node.parent] + 1


@settings(max_examples=50, deadline=None)
@given(any_slots, st.integers(0, 6))
def test_cap_of_one_is_the_chain(logprobs, budget):
    chain = expand(logprobs, TreeLimits(budget, 4, Expansion.CHAIN))
    assert [node.rank for node in chain] == [0] * len(chain)
    for expansion in (Expansion.BEST_FIRST, Expansion.CHAIN_SEEDED):
        assert expand(logprobs, TreeLimits(budget, 1, expansion)) == chain


def test_equal_scores_go_by_depth_then_parent_then_rank():
    half = [-0.5, -0.5, -1.0]
    nodes = expand([half, half], TreeLimits(8, 3))
    assert [(node.parent, node.depth, node.rank) for node in nodes] == [
        (0, 1, 0), (0, 1, 1), (0, 1, 2), (1, 2, 0), (1, 2, 1), (2, 2, 0), (2, 2, 1), (1, 2, 2),
    ]  # fmt: skip


def test_scores_are_float32_sums_from_the_root():
    values = [-0.1, -0.2, -0.3, -1e-8]
    nodes = expand([[value] for value in values], TreeLimits(4, 1))
    score = np.float32(0)
    for node, value in zip(nodes, values, strict=True):
        score = np.float32(score + np.float32(value))
        assert node.score == float(score)


@pytest.mark.parametrize("expansion", MARGINAL)
@pytest.mark.parametrize("bad", [-inf, nan])
def test_a_slot_without_candidates_ends_the_tree(expansion, bad):
    nodes = expand([[-0.5, -1.0], [bad, bad], [-0.5, -1.0]], TreeLimits(9, 2, expansion))
    assert {node.depth for node in nodes} == {1}


@pytest.mark.parametrize(
    ("budget", "cap", "word"), [(-1, 1, "budget -1"), (4, 0, "cap 0"), (4, -2, "cap -2")]
)
def test_limits_out_of_range_are_refused(budget, cap, word):
    with pytest.raises(ValueError, match=word):
        expand([[-1.0]], TreeLimits(budget, cap))


def test_no_slots_give_no_nodes():
    assert all(expand([], TreeLimits(4, 2, expansion)) == [] for expansion in MARGINAL)
