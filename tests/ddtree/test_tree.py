"""Trees of a batch: candidates, fixed shapes, padding, masks, positions."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.ddtree.policies import expand
from toolkit.ddtree.tree import BatchLimits, ancestor_mask, build_trees, positions, topk_logprobs
from toolkit.ddtree.types import Expansion, TreeLimits

LIMITS = [
    TreeLimits(12, 4),
    TreeLimits(3, 2),
    TreeLimits(7, 4, Expansion.CHAIN),
    TreeLimits(9, 9, Expansion.CHAIN_SEEDED),
    TreeLimits(0, 1),
]


def batch(limits=LIMITS, slots=5, ranks=4, max_budget=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs, tokens = topk_logprobs(torch.randn(len(limits), slots, 50, generator=generator) * 2, ranks)
    roots = torch.arange(100, 100 + len(limits))
    return logprobs, tokens, build_trees(logprobs, tokens, roots, BatchLimits.of(limits), max_budget)


class TestTopk:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_ranks_by_logit_and_then_by_token(self, dtype, data):
        vocabulary = data.draw(st.integers(1, 63))
        k = data.draw(st.integers(1, vocabulary))
        value = st.sampled_from([-inf, -2.0, -0.0, 0.0, 1e-30, 1.0, 1.0078125, 300.0])
        logits = data.draw(st.lists(value, min_size=vocabulary, max_size=vocabulary))
        row = torch.tensor([logits, list(range(vocabulary))], dtype=dtype)
        _, tokens = topk_logprobs(row, k)
        expected = [sorted(range(vocabulary), key=lambda t: (-x[t], t))[:k] for x in row.tolist()]
        assert tokens.tolist() == expected

    def test_logprobs_are_float32_and_at_most_zero(self):
        logits = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(1)) * 5
        logprobs, tokens = topk_logprobs(logits.bfloat16(), 7)
        assert logprobs.dtype == torch.float32
        assert tokens.dtype == torch.int64
        expected = torch.log_softmax(logits.bfloat16().double(), -1).gather(-1, tokens)
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
        certain, _ = topk_logprobs(torch.tensor([[80.0, *[79.99999] * 3]]) - 79.9, 1)
        assert (certain <= 0).all()
        assert topk_logprobs(torch.tensor([[1e4, -1e4]]), 1)[0].item() == 0.0

    def test_values_that_only_differ_in_float32_are_told_apart(self):
        logits = torch.tensor([[1.0, 1.0 + 2**-20]])
        assert topk_logprobs(logits, 1)[1].item() == 1
        assert topk_logprobs(logits.bfloat16(), 1)[1].item() == 0

    @pytest.mark.parametrize("bad", [nan, inf])
    def test_a_broken_row_offers_nothing(self, bad):
        logprobs, _ = topk_logprobs(torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]]), 2)
        assert not (logprobs[0] > -inf).any()
        assert (logprobs[1] > -inf).all()

    def test_bad_arguments_are_refused(self):
        with pytest.raises(ValueError, match=r"top-k 4 is outside 1\.\.3"):
            topk_logprobs(torch.zeros(1, 3), 4)
        with pytest.raises(ValueError, match="top-k 0"):
            topk_logprobs(torch.zeros(1, 3), 0)
        with pytest.raises(ValueError, match=r"torch\.float64"):
            topk_logprobs(torch.zeros(1, 3, dtype=torch.float64), 1)


def test_each_request_gets_its_own_tree():
    logprobs, tokens, trees = batch()
    for row, limits in enumerate(LIMITS):
        nodes = expand(logprobs[row].tolist(), limits)
        count = len(nodes)
        assert trees.counts[row] == count
        own = slice(1, count + 1)
        assert trees.parents[row, own].tolist() == [node.parent for node in nodes]
        assert trees.depths[row, own].tolist() == [node.depth for node in nodes]
        assert trees.ranks[row, own].tolist() == [node.rank for node in nodes]
        assert trees.scores[row, own].tolist() == [node.score for node in nodes]
        assert trees.tokens[row, own].tolist() == [
            tokens[row, node.depth - 1, node.rank].item() for node in nodes
        ]
    assert trees.counts.tolist()[:3] == [12, 3, 5]


def test_a_tree_does_not_depend_on_its_neighbours():
    logprobs, tokens, together = batch()
    for row, limits in enumerate(LIMITS):
        one = slice(row, row + 1)
        alone = build_trees(
            logprobs[one], tokens[one], torch.tensor([100 + row]), BatchLimits.of([limits]), 12
        )
        for name in ("tokens", "parents", "depths", "ranks", "scores", "valid", "counts"):
            assert torch.equal(getattr(together, name)[one], getattr(alone, name)), name


def test_root_and_padding():
    _, _, trees = batch()
    columns = torch.arange(13)
    assert trees.tokens[:, 0].tolist() == [100, 101, 102, 103, 104]
    assert trees.valid[:, 0].all()
    assert (trees.valid.sum(1) == trees.counts + 1).all()
    bare = ~trees.valid
    assert bare.any()
    assert torch.equal(bare, columns > trees.counts.unsqueeze(1))
    assert torch.equal(trees.parents[bare], columns.expand(5, 13)[bare])
    assert (trees.depths[bare] == 0).all()
    assert (trees.ranks[bare] == -1).all()
    assert (trees.scores[bare] == -inf).all()
    assert torch.equal(trees.tokens[bare], trees.tokens[:, :1].expand(5, 13)[bare])
    for name in ("parents", "depths", "scores"):
        assert (getattr(trees, name)[:, 0] == 0).all()


def test_ancestor_mask_is_the_path_to_the_root():
    _, _, trees = batch()
    expected = torch.zeros(5, 13, 13, dtype=torch.bool)
    for row in range(5):
        for node in range(13):
            at = node
            expected[row, node, at] = True
            while trees.valid[row, node] and at:
                at = trees.parents[row, at].item()
                expected[row, node, at] = True
    assert torch.equal(ancestor_mask(trees), expected)


def test_positions_follow_depth_from_the_committed_length():
    _, _, trees = batch()
    place = positions(trees, torch.tensor([10, 0, 3, 7, 1], dtype=torch.int32))
    assert place.dtype == torch.int64
    assert place[:, 0].tolist() == [10, 0, 3, 7, 1]
    assert torch.equal(place - place[:, :1], trees.depths)
    assert place[0].max() > 11


def test_limits_survive_the_trip_through_tensors():
    assert BatchLimits.of(LIMITS).rows() == LIMITS


def test_a_budget_above_the_batch_is_refused():
    with pytest.raises(ValueError, match="budget 12 is above the batch's 11"):
        batch(max_budget=11)
