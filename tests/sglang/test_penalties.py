"""Penalties along a tree's paths: the kernels beside a plain loop, and the bookkeeping of requests."""

import math
from types import SimpleNamespace

import pytest
import torch

from toolkit.ddtree.kernels.penalties import PenaltyTable, count_tokens, penalise
from toolkit.ddtree.kernels.tree_builder import build_trees
from toolkit.ddtree.sglang.kernels import Commit
from toolkit.ddtree.sglang.penalties import Penalties, restore
from toolkit.ddtree.sglang.sampling import target_tokens
from toolkit.ddtree.tree import BatchLimits, ancestor_mask, topk_logprobs
from toolkit.ddtree.types import TreeLimits

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted here, run by tests/gpu there")

VOCABULARY, BUDGET, SLOTS = 24, 9, 4
WIDTH = BUDGET + 1


def grown(seed=3):
    """Trees of three requests over few tokens, so that paths repeat some."""
    torch.manual_seed(seed)
    logits = torch.randn(3, SLOTS, VOCABULARY)
    logits[..., 5:] -= 6.0
    logprobs, tokens = topk_logprobs(logits, 4)
    limits = BatchLimits.of([TreeLimits(BUDGET, 4), TreeLimits(6, 2), TreeLimits(BUDGET, 3)])
    trees, _ = build_trees(logprobs, tokens.contiguous(), torch.tensor([1, 2, 3]), limits, BUDGET)
    return trees


def table():
    generator = torch.Generator().manual_seed(8)
    counts = torch.randint(0, 3, (2, VOCABULARY), generator=generator, dtype=torch.int32)
    return PenaltyTable(
        counts=counts,
        settings=torch.tensor([[0.5, 0.25, 1.0], [0.0, -0.5, 1.7]]),
        lengths=torch.tensor([[4, 0], [3, 6]], dtype=torch.int32),
        stops=torch.tensor([[-1, -1], [2, 11]], dtype=torch.int32),
    )


def plain(logits, trees, request, row, told):
    """One request's rows, token by token."""
    frequency, presence, repetition = told.settings[row].tolist()
    produced, least = told.lengths[row].tolist()
    result = logits.clone()
    seen = ancestor_mask(trees)[request]
    for node in range(int(trees.counts[request]) + 1):
        path = [int(trees.tokens[request, other]) for other in range(1, WIDTH) if seen[node, other]]
        for token in range(VOCABULARY):
            count = int(told.counts[row, token]) + path.count(token)
            value = float(logits[node, token]) - frequency * count - presence * (count > 0)
            if count:
                value = value / repetition if value > 0 else value * repetition
            if produced + len(path) < least and token in told.stops[row].tolist():
                value = -math.inf
            result[node, token] = value
    return result


def test_each_node_is_penalised_by_its_own_path():
    trees, told = grown(), table()
    padded = torch.randn(3 * WIDTH, VOCABULARY + 5) * 3
    logits = padded[:, :VOCABULARY]  # rows further apart than they are long
    before = padded.clone()
    penalise(logits, torch.tensor([1, -1, 0], dtype=torch.int32), told, trees)
    for request, row in ((0, 1), (2, 0)):
        rows = slice(request * WIDTH, request * WIDTH + int(trees.counts[request]) + 1)
        expected = plain(before[request * WIDTH :, :VOCABULARY][:WIDTH], trees, request, row, told)
        assert torch.allclose(logits[rows], expected[: rows.stop - rows.start], atol=1e-5)
        assert not torch.allclose(logits[rows], before[rows, :VOCABULARY], atol=1e-3)
    assert torch.equal(logits[WIDTH : 2 * WIDTH], before[WIDTH : 2 * WIDTH, :VOCABULARY])
    assert torch.equal(padded[:, VOCABULARY:], before[:, VOCABULARY:])


def test_committed_tokens_are_counted_once_each():
    told = table()
    counts, lengths = told.counts.clone(), told.lengths.clone()
    tokens = torch.tensor([[7, 7, 2, 9], [5, 5, 5, 5], [1, 9, 9, 9]])
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    count_tokens(rows, tokens, torch.tensor([3, 4, 1], dtype=torch.int32), told)
    for token in (7, 7, 2):
        counts[1, token] += 1
    counts[0, 1] += 1
    assert torch.equal(told.counts, counts)
    assert (told.lengths - lengths).tolist() == [[1, 0], [3, 0]]


def request(place, output=(), **asked):
    params = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    params |= {"min_new_tokens": 0, "stop_token_ids": None}
    return SimpleNamespace(
        req_pool_idx=place,
        output_ids=list(output),
        eos_token_ids={4},
        tokenizer=SimpleNamespace(eos_token_id=0, additional_stop_token_ids=None),
        sampling_params=SimpleNamespace(**params | asked),
    )


def penalised(penalties, reqs, trees):
    logits = torch.zeros(len(reqs) * WIDTH, VOCABULARY)
    penalties.apply(logits, reqs, trees)
    return logits.view(len(reqs), WIDTH, VOCABULARY)[:, 0]


def first_trees(count):
    trees = grown()
    columns = {name: getattr(trees, name)[:count] for name in ("tokens", "parents", "depths", "counts")}
    return SimpleNamespace(**columns, max_depth=trees.max_depth)


def test_a_request_is_counted_from_its_prefill_on():
    """What it had output before a retraction counts; what an earlier request left in its place does not."""
    penalties = Penalties(VOCABULARY, torch.device("cpu"))
    old, new = request(3, frequency_penalty=1.0), request(3, [6, 6, 8], frequency_penalty=0.5)
    penalties.begin([old], torch.tensor([9]))
    penalties.begin([new], torch.tensor([8]))
    logits = penalised(penalties, [new], first_trees(1))[0]
    expected = torch.zeros(VOCABULARY)
    expected[6], expected[8] = -1.0, -1.0
    assert torch.equal(logits, expected)
    commit = Commit(torch.tensor([[6, 2, 0]]), torch.tensor([2], dtype=torch.int32), *[torch.empty(0)] * 5)
    penalties.commit([new], commit)
    expected[6], expected[2] = -1.5, -0.5
    assert torch.equal(penalised(penalties, [new], first_trees(1))[0], expected)


def test_a_batch_of_requests_with_and_without_penalties():
    penalties = Penalties(VOCABULARY, torch.device("cpu"))
    reqs = [request(place, presence_penalty=float(place % 2)) for place in range(11)]
    penalties.begin(reqs, torch.arange(11))
    three = [reqs[9], reqs[4], reqs[7]]
    logits = penalised(penalties, three, first_trees(3))
    assert logits[0].nonzero().tolist() == [[9]]
    assert logits[1].abs().sum() == 0
    assert logits[2].nonzero().tolist() == [[7]]


def test_every_end_token_is_held_back():
    penalties = Penalties(VOCABULARY, torch.device("cpu"))
    held = request(0, min_new_tokens=2, stop_token_ids={5, 6, 7})
    penalties.begin([held], torch.tensor([9]))
    logits = penalised(penalties, [held], first_trees(1))[0]
    assert logits.isinf().nonzero().flatten().tolist() == [0, 4, 5, 6, 7]


def test_a_prefill_after_a_retraction_knows_what_was_output():
    reqs = [
        request(0, [3, 3, 5], frequency_penalty=0.5, repetition_penalty=1.5, min_new_tokens=3),
        request(1, [3]),
        request(2, [8], presence_penalty=1.0, min_new_tokens=2),
    ]
    info = SimpleNamespace(
        acc_additive_penalties=torch.zeros(3, VOCABULARY), acc_scaling_penalties=torch.ones(3, VOCABULARY)
    )
    info.acc_additive_penalties[0, 0] = -math.inf  # SGLang holds the tokenizer's end back, too long here
    restore(info, reqs)
    expected = torch.zeros(3, VOCABULARY)
    expected[0, 3], expected[0, 5], expected[2, 8] = -1.0, -0.5, -1.0
    expected[2, 0] = expected[2, 4] = -math.inf
    assert torch.equal(info.acc_additive_penalties, expected)
    assert info.acc_scaling_penalties[0, [3, 5]].tolist() == [1.5, 1.5]
    assert info.acc_scaling_penalties.sum() == 3 * VOCABULARY + 1.0


def test_draws_at_a_node_have_the_penalised_distribution():
    """Chi-square of draws after a node whose path holds two tokens, against the formula."""
    trees, told = grown(), table()
    told.settings[0] = torch.tensor([1.0, 0.5, 1.4])
    node = int(trees.depths[2].argmax())
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)).mul(0.7)
    nodes = plain(logits.expand(WIDTH, -1), trees, 2, 0, told).softmax(-1)
    expected, pathless = nodes[node], nodes[0]
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    info = SimpleNamespace(
        temperatures=torch.ones(3, 1), top_ks=torch.full((3,), 1 << 30), top_ps=torch.ones(3),
        min_ps=torch.zeros(3), logit_bias=None, is_all_greedy=False, need_top_k_sampling=False,
        need_top_p_sampling=False, need_min_p_sampling=False,
    )  # fmt: skip
    torch.manual_seed(2)
    changed = logits.repeat(3 * WIDTH, 1)
    penalise(changed, rows, told, trees)
    draws = 6000
    drawn = [int(target_tokens(changed.clone(), info, WIDTH)[2, node]) for _ in range(draws)]
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY).float()
    often = expected * draws >= 8
    groups = torch.cat([expected[often], expected[~often].sum()[None]]) * draws
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    chance, freedom = float(((seen - groups) ** 2 / groups).sum()), len(groups) - 1
    assert freedom >= 5
    assert chance < freedom + 4 * (2 * freedom) ** 0.5, (chance, freedom)
    counted = pathless[often] * draws
    assert float(((counts[often] - counted) ** 2 / counted).sum()) > 5 * freedom
