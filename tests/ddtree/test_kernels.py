"""Triton kernels against their plain references, in Triton's interpreter.

The interpreter takes milliseconds for what a GPU does in nanoseconds: sizes are small and odd here, and
tests/gpu has the large ones.
"""

import os
from dataclasses import fields
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from toolkit.ddtree import tree
from toolkit.ddtree.kernels import topk, tree_builder
from toolkit.ddtree.kernels.keys import (
    in_turn,
    key_tie,
    key_value,
    largest_keys,
    largest_sort,
    merge_largest,
    pack_key,
)
from toolkit.ddtree.transition import RankedChildren, TransitionTable
from toolkit.ddtree.tree import BatchLimits, DraftTrees
from toolkit.ddtree.types import Expansion, TreeLimits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poison():
    """Memory that a kernel leaves unwritten holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@triton.jit
def _largest(
    p_key, p_out, COUNT: tl.constexpr, LENGTH: tl.constexpr, RISING: tl.constexpr, SORTED: tl.constexpr
):
    b_key = tl.load(p_key + in_turn(tl.arange(0, LENGTH), SORTED))
    tl.store(p_out + tl.arange(0, COUNT), largest_keys(b_key, COUNT, RISING, SORTED))


@triton.jit
def _merge(p_left, p_right, p_out, LENGTH: tl.constexpr):
    o_key = tl.arange(0, LENGTH)
    tl.store(p_out + o_key, merge_largest(tl.load(p_left + o_key), tl.load(p_right + o_key)))


@triton.jit
def _round_trip(p_value, p_tie, p_key, p_value_out, p_tie_out, LENGTH: tl.constexpr):
    o_value = tl.arange(0, LENGTH)
    b_key = pack_key(tl.load(p_value + o_value), tl.load(p_tie + o_value))
    tl.store(p_key + o_value, b_key)
    tl.store(p_value_out + o_value, key_value(b_key))
    tl.store(p_tie_out + o_value, key_tie(b_key))


class TestKeys:
    @pytest.mark.parametrize(("length", "count"), [(2, 2), (32, 4), (16, 16), (64, 2)])
    @pytest.mark.parametrize("rising", [False, True])
    def test_largest(self, length, count, rising):
        generator = torch.Generator().manual_seed(length)
        keys = torch.randint(-(2**62), 2**62, (length,), generator=generator).to(DEVICE)
        out = torch.empty(count, dtype=torch.int64, device=DEVICE)
        expected = sorted(sorted(keys.tolist())[-count:], reverse=not rising)
        _largest[(1,)](keys, out, COUNT=count, LENGTH=length, RISING=rising, SORTED=1)
        assert out.tolist() == expected

    @pytest.mark.parametrize(("length", "count", "run"), [(16, 8, 8), (8, 8, 8), (32, 8, 2), (16, 16, 4)])
    def test_largest_of_sorted_runs(self, length, count, run):
        keys = torch.randperm(length, generator=torch.Generator().manual_seed(run))
        keys = keys.view(-1, run).sort(descending=True).values.to(DEVICE)
        out = torch.empty(count, dtype=torch.int64, device=DEVICE)
        _largest[(1,)](keys, out, COUNT=count, LENGTH=length, RISING=False, SORTED=run)
        assert out.tolist() == list(range(length - 1, length - 1 - count, -1))

    def test_merge(self):
        keys = torch.randperm(16, generator=torch.Generator().manual_seed(0)) - 8
        falling, rising = keys[:8].sort(descending=True).values, keys[8:].sort().values
        out = torch.empty(8, dtype=torch.int64, device=DEVICE)
        _merge[(1,)](falling.to(DEVICE), rising.to(DEVICE), out, LENGTH=8)
        assert out.tolist() == list(range(7, -1, -1))

    def test_order_and_round_trip(self):
        values = torch.tensor([3.5, 3.5, 1e-40, -0.0, 0.0, -1e-40, -2.0, -inf], device=DEVICE)
        ties = torch.tensor([0, 2**31 - 1, 9, 3, 4, 0, 7, 1], dtype=torch.int32, device=DEVICE)
        keys, tie_out = torch.empty_like(ties, dtype=torch.int64), torch.empty_like(ties, dtype=torch.int64)
        value_out = torch.empty_like(values)
        _round_trip[(1,)](values, ties, keys, value_out, tie_out, LENGTH=8)
        assert keys.tolist() == sorted(keys.tolist(), reverse=True)
        assert len(set(keys.tolist())) == 8
        assert torch.equal(value_out, values)
        assert torch.equal(tie_out, ties.long())


class TestTopk:
    def check(self, logits: torch.Tensor, k: int) -> None:
        logprobs, tokens = topk.topk_logprobs(logits.to(DEVICE), k)
        expected, expected_tokens = tree.topk_logprobs(logits, k)
        assert torch.equal(tokens.cpu(), expected_tokens)
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs.cpu(), expected, atol=2e-6, rtol=1e-6)
        assert (logprobs <= 0).all()

    @pytest.mark.parametrize(
        ("dtype", "vocabulary", "k"),
        [(torch.float32, 63, 63), (torch.bfloat16, 1000, 5), (torch.float16, 4097, 1)],
    )
    def test_dtypes_and_odd_sizes(self, dtype, vocabulary, k):
        generator = torch.Generator().manual_seed(vocabulary)
        self.check((torch.randn(1, 2, vocabulary, generator=generator) * 4).to(dtype), k)

    @pytest.mark.parametrize("k", [2, 13])
    def test_many_chunks_are_merged_in_rounds(self, k, monkeypatch):
        monkeypatch.setattr(topk, "_CHUNK", 64)
        monkeypatch.setattr(topk, "_MERGED", 64)
        logits = torch.randint(0, 40, (1, 700), generator=torch.Generator().manual_seed(k)).float()
        assert len(set(logits[0].topk(k).values.tolist())) < k
        self.check(logits, k)

    def test_impossible_tokens_and_a_certain_one(self, monkeypatch):
        monkeypatch.setattr(topk, "_CHUNK", 32)
        logits = torch.full((2, 99), -inf)
        logits[0, [40, 7]] = torch.tensor([1.0, 1.0])
        logits[1, 98] = -5.0
        self.check(logits, 4)

    def test_rows_may_be_strided(self):
        logits = torch.randn(3, 2, 80, generator=torch.Generator().manual_seed(0))
        self.check(logits[:, 1, :50], 3)

    @pytest.mark.parametrize("bad", [nan, inf])
    def test_a_broken_row_offers_nothing(self, bad):
        logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]], device=DEVICE)
        logprobs, _ = topk.topk_logprobs(logits, 2)
        assert logprobs[0].isnan().all()
        torch.testing.assert_close(logprobs[1].cpu(), tree.topk_logprobs(logits.cpu(), 2)[0][1])

    def test_bad_arguments_are_refused(self):
        with pytest.raises(ValueError, match=r"top-k 4 is outside 1\.\.3"):
            topk.topk_logprobs(torch.zeros(1, 3), 4)
        with pytest.raises(ValueError, match=r"top-k 9000 is outside 1\.\.2048"):
            topk.topk_logprobs(torch.zeros(1, 20000), 9000)
        with pytest.raises(ValueError, match=r"torch\.float64"):
            topk.topk_logprobs(torch.zeros(1, 3, dtype=torch.float64), 1)


def check_trees(
    logprobs: torch.Tensor, limits: list[TreeLimits], max_budget: int, table_seed: int | None = None
) -> DraftTrees:
    """Kernel and reference agree bit for bit; gives the reference's trees.

    With a seed, candidates are re-scored by a coarse random table, for requests of the policy `transition`.
    """
    tokens = torch.arange(logprobs.numel()).view(logprobs.shape) * 7 % 1001
    roots = torch.arange(len(limits)) + 5000
    batch, on_device, children = BatchLimits.of(limits), BatchLimits.of(limits, DEVICE), None
    if table_seed is not None:
        generator = torch.Generator().manual_seed(table_seed)
        left, right = torch.randint(-1, 2, (2, 5010, 2), generator=generator)
        table = TransitionTable(left, right, torch.ones(logprobs.shape[1]))
        children = table.rank_children(logprobs, tokens, roots, batch.topk_cap)
    expected = tree.build_trees(logprobs, tokens, roots, batch, max_budget, children)
    if children is not None:
        children = RankedChildren(children.logprobs.to(DEVICE), children.ranks.to(DEVICE))
    trees, links = tree_builder.build_trees(
        logprobs.to(DEVICE), tokens.to(DEVICE), roots.to(DEVICE), on_device, max_budget, children
    )
    expected_links = tree_builder.tree_links(expected)
    for field in fields(DraftTrees)[:-1]:
        left, right = getattr(trees, field.name).cpu(), getattr(expected, field.name)
        assert left.dtype == right.dtype
        assert torch.equal(left, right), field.name
    for field in fields(tree_builder.TreeLinks):
        assert torch.equal(getattr(links, field.name).cpu(), getattr(expected_links, field.name)), field.name
    return expected


@st.composite
def batches(draw):
    requests, slots, ranks = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    max_budget = draw(st.integers(0, 7))
    value = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.3, -inf])
    values = draw(st.lists(value, min_size=requests * slots * ranks, max_size=requests * slots * ranks))
    logprobs = torch.tensor(values).view(requests, slots, ranks).sort(-1, descending=True).values
    table_seed = draw(st.one_of(st.none(), st.integers(0, 2**31)))
    policies = [
        policy for policy in Expansion if table_seed is not None or policy is not Expansion.TRANSITION
    ]
    limit = st.builds(TreeLimits, st.integers(0, max_budget), st.integers(1, 4), st.sampled_from(policies))
    return logprobs, draw(st.lists(limit, min_size=requests, max_size=requests)), max_budget, table_seed


class TestTrees:
    @settings(max_examples=12, deadline=None)
    @given(batches())
    def test_ties_and_impossible_candidates(self, case):
        check_trees(*case)

    def test_unequal_requests_in_one_launch(self):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(4, 3, 5, generator=generator) * 2
        logprobs = torch.log_softmax(logits, -1).sort(-1, descending=True).values
        limits = [
            TreeLimits(13, 5),
            TreeLimits(2, 3, Expansion.CHAIN_SEEDED),
            TreeLimits(13, 5, Expansion.CHAIN),
            TreeLimits(11, 2),
        ]
        trees = check_trees(logprobs, limits, 13)
        assert trees.counts.tolist() == [13, 2, 3, 11]

    def test_re_scored_requests_beside_others(self):
        generator = torch.Generator().manual_seed(4)
        logits = torch.randn(4, 4, 5, generator=generator) * 2
        logprobs = torch.log_softmax(logits, -1).sort(-1, descending=True).values
        limits = [
            TreeLimits(14, 5, Expansion.TRANSITION),
            TreeLimits(14, 5),
            TreeLimits(9, 3, Expansion.TRANSITION),
            TreeLimits(14, 1, Expansion.TRANSITION),
        ]
        trees = check_trees(logprobs, limits, 14, table_seed=0)
        assert trees.counts.tolist() == [14, 14, 9, 4]
        assert trees.ranks[3].tolist() == [-1, 0, 0, 0, 0, *[-1] * 10]

    def test_every_child_of_one_parent(self):
        """A budget that siblings alone spend, which the re-scoring puts in an order of its own."""
        logprobs = torch.tensor([[[-1.0, -1.5, -2.0, -2.5, -3.0, -3.5]]])
        trees = check_trees(logprobs, [TreeLimits(6, 6, Expansion.TRANSITION)], 6, table_seed=2)
        first = trees.ranks[0][trees.depths[0] == 1].tolist()
        assert first != sorted(first)
        assert sorted(first) == [0, 1, 2, 3, 4, 5]

    def test_a_budget_of_siblings(self):
        logprobs = torch.tensor([[[-1.0, -1.5, -2.0, -2.5, -3.0, -3.5], [-9.0] * 6]])
        assert check_trees(logprobs, [TreeLimits(6, 6)], 6).ranks.tolist() == [[-1, 0, 1, 2, 3, 4, 5]]

    def test_a_slot_of_nan_ends_the_tree(self):
        logprobs = torch.tensor([[[-0.5, -1.0], [nan, nan], [-0.5, -1.0]]])
        assert check_trees(logprobs, [TreeLimits(5, 2)], 5).counts.tolist() == [2]

    def test_links_of_trees_wider_than_a_word(self):
        generator = torch.Generator().manual_seed(2)
        logprobs = torch.log_softmax(torch.randn(2, 7, 8, generator=generator), -1)
        logprobs = logprobs.sort(-1, descending=True).values
        trees = tree.build_trees(
            logprobs, torch.zeros(2, 7, 8, dtype=torch.int64), torch.zeros(2), BatchLimits.of(
                [TreeLimits(140, 8), TreeLimits(70, 8, Expansion.CHAIN_SEEDED)]
            ), 140,
        )  # fmt: skip
        expected = tree_builder.tree_links(trees)
        assert expected.ancestors.shape == (2, 141, 3)
        on_device = DraftTrees(
            *(getattr(trees, field.name).to(DEVICE) for field in fields(DraftTrees)[:-1]), trees.max_depth
        )
        links = tree_builder._link(on_device)
        for field in fields(tree_builder.TreeLinks):
            assert torch.equal(getattr(links, field.name).cpu(), getattr(expected, field.name)), field.name

    def test_the_reference_links_say_what_the_mask_says(self):
        logprobs = torch.tensor([[[-0.5, -1.0], [-0.5, -1.0]]])
        trees = tree.build_trees(
            logprobs, torch.tensor([[[1, 2], [3, 4]]]), torch.zeros(1), BatchLimits.of([TreeLimits(5, 2)]), 6
        )
        links = tree_builder.tree_links(trees)
        assert trees.parents.tolist() == [[0, 0, 0, 1, 1, 2, 6]]
        assert links.ancestors[0, :, 0].tolist() == [1, 3, 5, 11, 19, 37, 64]
        assert links.first_child.tolist() == [[1, 3, 5, -1, -1, -1, -1]]
        assert links.next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1, -1]]

    def test_more_than_the_device_sorts_is_refused(self):
        budget = largest_sort(torch.device(DEVICE)) + 1
        with pytest.raises(ValueError, match="lower the budget or the top-k cap"):
            tree_builder.build_trees(
                torch.zeros(1, 1, 2, device=DEVICE), torch.zeros(1, 1, 2, dtype=torch.int64, device=DEVICE),
                torch.zeros(1, dtype=torch.int64, device=DEVICE),
                BatchLimits.of([TreeLimits(budget, 2)], DEVICE), budget,
            )  # fmt: skip
