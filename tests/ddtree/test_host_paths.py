"""On a CPU some tree operations take another path than on a GPU: both give the same."""

from dataclasses import fields
from math import inf, nan

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.ddtree import tree
from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.tree import BatchLimits, build_trees, topk_logprobs
from toolkit.ddtree.types import Expansion, TreeLimits
from toolkit.ddtree.walk import Walk, _walk_on_device, _walk_on_host


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 9), st.floats(0, 0.5), st.integers(0, 2**31))
def test_re_scoring(requests, slots, ranks, missing, seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, tokens = topk_logprobs(torch.randn(requests, slots, 30, generator=generator) * 2, ranks)
    gone = torch.rand(requests, slots, 1, generator=generator) * ranks < torch.arange(ranks) * missing * 2
    logprobs = torch.where(gone, torch.tensor([-inf, nan])[seed % 2], logprobs)
    left, right = torch.randn(2, 30, 5, generator=generator)
    table = TransitionTable(left, right, torch.rand(7, generator=generator))
    roots = torch.randint(30, (requests,), generator=generator)
    caps = torch.randint(1, ranks + 2, (requests,), generator=generator)
    host = table._rank_on_host(logprobs, tokens, roots, caps)
    device = table._rank_on_device(logprobs, tokens, roots, caps)
    torch.testing.assert_close(host.logprobs, device.logprobs, rtol=1e-5, atol=1e-5)
    assert host.ranks.dtype == device.ranks.dtype
    distinct = (device.logprobs.nan_to_num(neginf=-99).diff(dim=-1).abs() > 1e-5).all(-1)
    assert torch.equal(host.ranks[distinct], device.ranks[distinct])


MARGINAL = [expansion for expansion in Expansion if expansion is not Expansion.TRANSITION]
LIMITS = st.builds(TreeLimits, st.integers(0, 70), st.integers(1, 4), st.sampled_from(MARGINAL))


@settings(max_examples=60, deadline=None)
@given(st.lists(LIMITS, min_size=1, max_size=4), st.integers(0, 2**31))
def test_masks_and_walks(limits, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(limits), 7, 6, generator=generator)
    roots = torch.randint(6, (len(limits),), generator=generator)
    trees = build_trees(
        *topk_logprobs(logits, 4), roots, BatchLimits.of(limits), max(limit.budget for limit in limits)
    )
    assert torch.equal(tree._ancestors_on_host(trees.parents.tolist()), tree._ancestors_on_device(trees))
    # what the target says is mostly what some node holds, so that paths are long
    choices = torch.randint(6, trees.tokens.shape, generator=generator)
    child = trees.valid & (torch.rand(trees.tokens.shape, generator=generator) < 0.8)
    choices.scatter_(1, trees.parents, torch.where(child, trees.tokens, choices.gather(1, trees.parents)))
    ours, theirs = _walk_on_host(trees, choices), _walk_on_device(trees, choices)
    for field in fields(Walk):
        assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name
