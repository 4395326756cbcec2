"""Path-conditioned re-scoring: its formula, its trees against brute force, its table's file, and its gain."""

import json
import shutil
from dataclasses import replace
from itertools import product
from math import exp, inf, log, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.ddtree.conftest import Pair, build_engine, generate, request, write_json, write_transition
from toolkit.ddtree.engine import Engine
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.policies import Children, expand
from toolkit.ddtree.replay import Trace, replay
from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.tree import BatchLimits, build_trees, topk_logprobs
from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, TreeLimits

TRANSITION = Expansion.TRANSITION


def random_table(vocab, slots, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, vocab, 6, generator=generator) * scale
    return TransitionTable(left, right, torch.rand(slots, generator=generator))


def drafted(requests=2, slots=3, ranks=4, vocab=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, slots, vocab, generator=generator) * 2
    roots = torch.randint(vocab, (requests,), generator=generator)
    return *topk_logprobs(logits, ranks), roots


def test_scores_are_the_formula():
    logprobs, tokens, roots = drafted()
    table = random_table(20, 3)
    caps = [4, 2]
    ranked = table.rank_children(logprobs, tokens, roots, torch.tensor(caps))
    for r, s, above in product(range(2), range(3), range(4)):
        a = roots[r] if s == 0 else tokens[r, s - 1, above]
        raw = [
            float(logprobs[r, s, rank])
            + float(table._strengths[s] * table._left[a] @ table._right[tokens[r, s, rank]])
            for rank in range(caps[r])
        ]
        total = log(sum(map(exp, raw)))
        found = dict(
            zip(ranked.ranks[r, s, above].tolist(), ranked.logprobs[r, s, above].tolist(), strict=True)
        )
        assert sorted(found) == [0, 1, 2, 3]
        for rank in range(4):
            expected = raw[rank] - total if rank < caps[r] else -inf
            assert found[rank] == pytest.approx(expected, abs=1e-5)


def test_children_fall_and_are_probabilities():
    logprobs, tokens, roots = drafted(seed=3)
    ranked = random_table(20, 3, scale=2.0).rank_children(logprobs, tokens, roots, torch.tensor([4, 3]))
    assert (ranked.logprobs <= 0).all()
    assert (ranked.logprobs[..., 1:] <= ranked.logprobs[..., :-1]).all()
    torch.testing.assert_close(ranked.logprobs.exp().sum(-1), torch.ones(2, 3, 4))
    assert (ranked.ranks[:, 1:, 0] != ranked.ranks[:, 1:, 1]).any(), "every parent has the same order"


def test_equally_probable_children_keep_the_drafter_s_order():
    logprobs = torch.full((1, 2, 4), -2.0)
    table = TransitionTable(torch.zeros(9, 1), torch.zeros(9, 1), torch.ones(2))
    ranked = table.rank_children(
        logprobs, torch.arange(8).view(1, 2, 4), torch.tensor([8]), torch.tensor([4])
    )
    assert ranked.ranks.tolist() == [[[[0, 1, 2, 3]] * 4] * 2]


@pytest.mark.parametrize("bad", [-inf, nan])
def test_a_slot_without_candidates_has_no_children(bad):
    logprobs = torch.tensor([[[-0.5, -1.0], [bad, bad], [-0.5, bad]]])
    tokens = torch.arange(6).view(1, 3, 2)
    ranked = random_table(9, 3).rank_children(logprobs, tokens, torch.tensor([7]), torch.tensor([2]))
    assert (ranked.logprobs[0, 1] == -inf).all()
    assert ranked.logprobs[0, 2].tolist() == [[0.0, -inf]] * 2
    assert ranked.ranks[0, 2, :, 0].tolist() == [0, 0]


def as_children(ranked, row=0):
    return Children(ranked.logprobs[row].tolist(), ranked.ranks[row].tolist())


@st.composite
def families(draw):
    """Children [S][K][K] of one request; coarse scores tie often."""
    slots, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    value = st.one_of(st.sampled_from([0.0, -0.5, -1.0, -inf]), st.floats(-6, 0, width=32, allow_nan=False))
    logprobs, order = [], []
    for _ in range(slots):
        rows = [
            sorted(draw(st.lists(value, min_size=ranks, max_size=ranks)), reverse=True) for _ in range(ranks)
        ]
        logprobs.append(rows)
        order.append([draw(st.permutations(range(ranks))) for _ in range(ranks)])
    return Children(logprobs, order)


def prefixes(children):
    """Every prefix as (places, ranks, float32 score), in the tree's order."""
    scores, ranks = {(): np.float32(0)}, {(): ()}
    for depth, slot in enumerate(children.logprobs, 1):
        for places in product(range(len(slot[0])), repeat=depth):
            above = places[:-1]
            if above in scores:
                parent = ranks[above][-1] if above else 0
                score = np.float32(scores[above] + np.float32(slot[parent][places[-1]]))
                if score > -inf:
                    scores[places] = score
                    ranks[places] = (*ranks[above], children.ranks[depth - 1][parent][places[-1]])

    def order(places):
        return (-scores[places], len(places), order(places[:-1]), places[-1]) if places else ()

    return [(ranks[places], float(scores[places])) for places in sorted(scores, key=order) if places]


@settings(max_examples=200, deadline=None)
@given(families(), st.integers(0, 40))
def test_the_tree_is_the_most_probable_prefixes(children, budget):
    nodes = expand([], TreeLimits(budget, 3, TRANSITION), children)
    paths = [()]
    for index, node in enumerate(nodes, 1):
        assert node.parent < index
        assert node.depth == len(paths[node.parent]) + 1
        paths.append((*paths[node.parent], node.rank))
    assert [(path, node.score) for path, node in zip(paths[1:], nodes, strict=True)] == prefixes(children)[
        :budget
    ]


def test_one_candidate_a_slot_is_the_chain():
    logprobs, tokens, roots = drafted(requests=1, slots=5)
    ranked = random_table(20, 5).rank_children(logprobs, tokens, roots, torch.tensor([1]))
    nodes = expand(logprobs[0].tolist(), TreeLimits(5, 1, TRANSITION), as_children(ranked))
    assert [(node.parent, node.depth, node.rank) for node in nodes] == [(i, i + 1, 0) for i in range(5)]


def test_without_children_the_policy_is_refused():
    with pytest.raises(ValueError, match="transition table"):
        expand([[-1.0]], TreeLimits(1, 1, TRANSITION))


def test_only_requests_that_ask_for_it_are_re_scored():
    logprobs, tokens, roots = drafted(requests=3, slots=4)
    caps = torch.tensor([4, 4, 2])
    ranked = random_table(20, 4, scale=2.0).rank_children(logprobs, tokens, roots, caps)
    limits = [TreeLimits(6, 4), TreeLimits(6, 4, TRANSITION), TreeLimits(9, 2, TRANSITION)]
    mixed = build_trees(logprobs, tokens, roots, BatchLimits.of(limits), 9, ranked)
    plain = build_trees(logprobs, tokens, roots, BatchLimits.of([TreeLimits(6, 4)] * 3), 9)
    assert torch.equal(mixed.tokens[0], plain.tokens[0])
    assert not torch.equal(mixed.tokens[1], plain.tokens[1])
    assert mixed.ranks[2].max() == 1


def world(rows=40, length=61):
    """A trace of text where two tokens can follow each, and of marginals that do not know which."""
    generator = torch.Generator().manual_seed(0)
    step = torch.randint(1, 3, (rows, length), generator=generator)
    tokens = step.cumsum(1) % 11  # each token is one or two above the one before
    slots = torch.arange(1, 4)
    anchors = length - 8
    after = tokens[:, :anchors, None, None]
    foreseen = (after + slots.view(1, 1, -1, 1) + torch.arange(4)) % 11
    logprobs = torch.full(foreseen.shape, log(0.25))
    return Trace(tokens, logprobs, foreseen, 0, 4)


def test_replay_gains_what_the_table_knows():
    difference = (torch.arange(11) - torch.arange(11).view(-1, 1)) % 11  # [a, b]
    factors = torch.linalg.svd(torch.where((difference == 1) | (difference == 2), 0.0, -9.0))
    table = TransitionTable(factors.U * factors.S, factors.Vh.T, torch.ones(3))
    limits = TreeLimits(7, 4, TRANSITION)
    informed = replay(world(), limits, table).acceptance_length
    assert informed == pytest.approx(
        3.125, abs=0.05
    )  # two nodes, four, and one of eight, and the bonus token
    assert replay(world(), TreeLimits(7, 4)).acceptance_length < 2.7
    with pytest.raises(ValueError, match="transition table"):
        replay(world(), limits)


@pytest.fixture
def pair(tiny_pair, tmp_path):
    """A copy with a transition table, that a test may break."""
    shutil.copytree(tiny_pair.target, tmp_path / "target")
    shutil.copytree(tiny_pair.drafter, tmp_path / "drafter")
    write_transition(tmp_path / "drafter", 272)
    return Pair(tmp_path / "target", tmp_path / "drafter")


HALF, INT8 = torch.float16, torch.int8


def edit_table(pair, **changes):
    path = pair.drafter / "transition.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def edit_config(pair, value):
    path = pair.drafter / "config.json"
    write_json(path, {**json.loads(path.read_text()), "transition_config": value})


def test_the_file_is_the_table(pair):
    table = Engine(EngineConfig(pair.target, pair.drafter)).models.drafter.transition
    stored = load_file(pair.drafter / "transition.safetensors")
    torch.testing.assert_close(table._left[5], stored["left"][5].float() * stored["left_scale"][5].float())
    torch.testing.assert_close(table._right[7], stored["right"][7].float() * stored["right_scale"][7].float())
    assert table.slots == 7


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda p: (p.drafter / "transition.safetensors").unlink(), ["no such file", "transition_config"]),
        (lambda p: (p.drafter / "transition.safetensors").write_bytes(b"cut"), ["truncated or corrupt"]),
        (lambda p: edit_table(p, left=torch.zeros(272, 5, dtype=INT8)), ["left:", "[272, 5]", "[272, 4]"]),
        (lambda p: edit_table(p, right=torch.zeros(272, 4)), ["right:", "torch.float32", "torch.int8"]),
        (lambda p: edit_table(p, left_scale=None), ["left_scale: no such tensor"]),
        (lambda p: edit_table(p, more=torch.zeros(1)), ["more:", "expected is no such tensor"]),
        (lambda p: edit_table(p, right_scale=torch.full((272,), nan, dtype=HALF)), ["right_scale", "NaN"]),
        (lambda p: edit_config(p, {"rank": 4, "strengths": [1.0] * 6}), ["strengths", "7 numbers"]),
        (lambda p: edit_config(p, {"rank": 4, "strengths": [inf] * 7}), ["strengths"]),
        (lambda p: edit_config(p, {"rank": 0, "strengths": [1.0] * 7}), ["transition_config.rank"]),
        (lambda p: edit_config(p, "yes"), ["transition_config", "not an object"]),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_served_is_named(pair, damage, parts):
    damage(pair)
    with pytest.raises(CheckpointError) as caught:
        Engine(EngineConfig(pair.target, pair.drafter))
    for part in (str(pair.drafter), *parts):
        assert part in str(caught.value)


def test_a_drafter_without_a_table_is_refused_by_name(tiny_pair):
    limits = TreeLimits(16, 8, TRANSITION)
    message = rf"drafter {tiny_pair.drafter} has none: its config\.json lacks transition_config"
    with pytest.raises(ValueError, match=message):
        build_engine(tiny_pair, limits=limits)
    engine = build_engine(tiny_pair)
    with pytest.raises(ValueError, match="use one of chain, best_first, chain_seeded"):
        engine.add(request("r", [5], limits))
    assert not engine.has_work


def test_a_request_may_ask_for_it(lucky_pair):
    """By its own limits, beside others: the same as a server that was started so."""
    limits = TreeLimits(12, 4, TRANSITION)
    alone = generate(build_engine(lucky_pair, limits=limits), request("a", [1, 2, 3]))["a"]
    engine = build_engine(lucky_pair, limits=TreeLimits(20, 6))
    results = generate(engine, request("a", [1, 2, 3], limits), request("b", [7]), request("c", [4, 4]))
    assert results["a"].told == alone.told

    def rounds(result):  # the rank of a rejected token is sought among the candidates of the whole batch
        return [replace(stats, reject_rank=None) for stats in result.rounds]

    assert rounds(results["a"]) == rounds(alone)
    plain = build_engine(lucky_pair, Algorithm.NONE)
    assert results["b"].tokens == generate(plain, request("b", [7]))["b"].tokens


def test_blocks_shorter_than_the_table(lucky_pair):
    engine = build_engine(lucky_pair, block_size=4, limits=TreeLimits(9, 4, TRANSITION))
    plain = build_engine(lucky_pair, Algorithm.NONE)
    one = request("r", [3, 1, 4])
    assert generate(engine, one)["r"].tokens == generate(plain, one)["r"].tokens
