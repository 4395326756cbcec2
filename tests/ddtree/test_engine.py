"""Decoding is lossless: whatever the mode, tree, batch or prompt, the tokens are the plain target's."""

import itertools

import pytest
import torch

from tests.ddtree.conftest import BUNDLED, build_engine, collect, generate, request
from toolkit.ddtree.engine import Engine
from toolkit.ddtree.types import Algorithm, Expansion, FinishReason, TreeLimits

PROMPTS = {
    "one": [5],
    "two": [3, 9],
    "seven": [1, 2, 3, 4, 5, 6, 7],
    "long": [(7 * i + i // 5) % 16 for i in range(61)],
}


def requests(**sampling):
    return [request(rid, prompt, **sampling) for rid, prompt in PROMPTS.items()]


@pytest.fixture(scope="module")
def plain(lucky_pair):
    """What plain decoding gives, each request alone."""
    engine = build_engine(lucky_pair, Algorithm.NONE)
    return {one.rid: generate(engine, one)[one.rid].told for one in requests()}


def told(results):
    return {rid: result.told for rid, result in results.items()}


def test_plain_batch_equals_plain_alone(lucky_pair, plain):
    assert told(generate(build_engine(lucky_pair, Algorithm.NONE), *requests())) == plain


def test_linear_dflash_equals_plain(lucky_pair, plain):
    results = generate(build_engine(lucky_pair, Algorithm.DFLASH), *requests())
    assert told(results) == plain
    accepted = [stats.accepted for result in results.values() for stats in result.rounds]
    assert 0 < sum(accepted) < 7 * len(accepted)


@pytest.mark.parametrize("expansion", Expansion)
@pytest.mark.parametrize(("budget", "cap"), [(7, 1), (7, 3), (8, 8), (16, 4), (33, 16)])
def test_trees_equal_plain(lucky_pair, plain, expansion, budget, cap):
    engine = build_engine(lucky_pair, limits=TreeLimits(budget, cap, expansion))
    results = generate(engine, *requests())
    assert told(results) == plain
    is_chain = expansion is Expansion.CHAIN or cap == 1 or (expansion, budget) == (Expansion.CHAIN_SEEDED, 7)
    if not is_chain:
        ranks = {rank for result in results.values() for stats in result.rounds for rank in stats.ranks}
        assert max(ranks) > 0, "no path off the greedy chain was ever accepted, so nothing was shown"


def test_unequal_trees_in_one_batch_equal_plain(lucky_pair, plain):
    limits = [
        TreeLimits(1, 1),
        TreeLimits(7, 1, Expansion.CHAIN),
        TreeLimits(20, 4, Expansion.CHAIN_SEEDED),
        None,
    ]
    engine = build_engine(lucky_pair, limits=TreeLimits(33, 8))
    batch = [
        request(rid, prompt, limit) for (rid, prompt), limit in zip(PROMPTS.items(), limits, strict=True)
    ]
    results = generate(engine, *batch)
    assert told(results) == plain
    for one, budget in zip(batch, (1, 7, 20, 33), strict=True):
        assert {stats.nodes for stats in results[one.rid].rounds} == {budget}  # padding is counted nowhere
    assert engine.stats.rounds == sum(len(result.rounds) for result in results.values())
    assert sum(engine.stats.accepted_histogram) == engine.stats.rounds


@pytest.mark.parametrize("limits", [TreeLimits(7, 1), TreeLimits(7, 1, Expansion.CHAIN_SEEDED)])
def test_chain_tree_takes_the_same_rounds_as_linear_dflash(lucky_pair, limits):
    linear = generate(build_engine(lucky_pair, Algorithm.DFLASH), *requests())
    chain = generate(build_engine(lucky_pair, limits=limits), *requests())
    assert told(chain) == told(linear)
    for rid in PROMPTS:
        assert [s.committed for s in chain[rid].rounds] == [s.committed for s in linear[rid].rounds]


def test_chain_limits_of_a_request_equal_a_server_launched_that_way(lucky_pair):
    limits = TreeLimits(7, 1, Expansion.CHAIN)
    narrow = build_engine(lucky_pair, limits=limits)
    wide = build_engine(lucky_pair, limits=TreeLimits(24, 8))
    for one in requests():
        by_request = request(one.rid, one.input_ids, limits)
        assert generate(wide, by_request)[one.rid] == generate(narrow, one)[one.rid]


def test_blocks_shorter_than_the_drafter_was_made_for(lucky_pair, plain):
    engine = build_engine(lucky_pair, block_size=4, limits=TreeLimits(9, 4))
    results = generate(engine, *requests())
    assert told(results) == plain
    assert max(stats.depth for result in results.values() for stats in result.rounds) == 3


def test_more_requests_than_the_batch_holds(lucky_pair):
    prompts = {f"r{i}": [i % 16, (3 * i) % 16][: 1 + i % 2] for i in range(21)}
    alone = build_engine(lucky_pair, Algorithm.NONE)
    expected = {
        rid: generate(alone, request(rid, prompt, max_new_tokens=12))[rid].told
        for rid, prompt in prompts.items()
    }
    engine = build_engine(lucky_pair, max_running_requests=16)
    for rid, prompt in prompts.items():
        engine.add(request(rid, prompt, max_new_tokens=12))
    results = {}
    collect(results, engine.step())
    assert (engine.stats.running, engine.stats.waiting) == (16, 5)
    while engine.has_work:
        collect(results, engine.step())
    assert told(results) == expected


def test_requests_join_and_leave_between_rounds(lucky_pair, plain):
    """The second joins after some steps of the first; either may be the one to leave first."""
    engine = build_engine(lucky_pair, limits=TreeLimits(12, 4))
    batch = {one.rid: one for one in requests()}
    pairs = [("one", "long"), ("long", "one"), ("seven", "two")]
    for (first, second), steps in itertools.product(pairs, (1, 4)):
        results = {}
        engine.add(batch[first])
        for _ in range(steps):
            collect(results, engine.step())
        engine.add(batch[second])
        while engine.has_work:
            collect(results, engine.step())
        assert told(results) == {first: plain[first], second: plain[second]}


def test_same_prompt_twice_alone_and_beside_others(lucky_pair, plain):
    engine = build_engine(lucky_pair)
    for _ in range(2):
        assert generate(engine, request("seven", PROMPTS["seven"]))["seven"].told == plain["seven"]
    twins = [request(f"twin{i}", PROMPTS["seven"]) for i in range(2)]
    results = generate(engine, *requests(), *twins)
    assert results["twin0"].told == results["twin1"].told == results["seven"].told == plain["seven"]


def test_kv_move_left_out_corrupts_the_text(lucky_pair, plain, monkeypatch):
    """The control that the lossless tests can fail."""
    monkeypatch.setattr(Engine, "_compact", lambda self, paths: None)
    results = generate(build_engine(lucky_pair, limits=TreeLimits(16, 8)), *requests())
    assert told(results) != plain


def test_padding_that_others_see_corrupts_the_text(lucky_pair, plain, monkeypatch):
    """Another control: a mask that ignores the tree."""
    monkeypatch.setattr(
        "toolkit.ddtree.engine.ancestor_mask",
        lambda trees: torch.ones(*trees.tokens.shape, trees.tokens.shape[1], dtype=torch.bool),
    )
    assert told(generate(build_engine(lucky_pair, limits=TreeLimits(16, 8)), *requests())) != plain


PYTHON = [
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path =",
    "for i in range(10):\n    print(",
    "try:\n    value = int(text)\nexcept ValueError as error:\n",
    "class Config(dict):\n",
    "if __name__ == '__main__':\n    main(",
    "import numpy as np\n\n\ndef norm(x, axis=None):\n    return np.",
    "def test_parse(self):\n        self.assertEqual(",
]


def test_bundled_pair_accepts_the_same_alone_and_among_sixteen():
    engine = build_engine(BUNDLED)
    batch = [
        request(f"{kind}{i}", engine.encode(text + suffix), max_new_tokens=20)
        for i, text in enumerate(PYTHON)
        for kind, suffix in (("a", ""), ("b", "  # "))
    ]
    together = generate(engine, *batch)
    alone = {}
    for one in batch:
        alone |= generate(engine, one)
    assert told(together) == told(alone)
    lengths = [
        sum(stats.committed for result in results.values() for stats in result.rounds)
        / sum(len(result.rounds) for result in results.values())
        for results in (together, alone)
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)
    assert lengths[1] > 2.0


def test_bundled_pair_is_lossless_and_wider_trees_accept_more():
    batch = [request(str(i), encode(text), max_new_tokens=32) for i, text in enumerate(PYTHON[:3])]
    expected = told(generate(build_engine(BUNDLED, Algorithm.NONE), *batch))
    rounds = {}
    for name, engine in {
        "linear": build_engine(BUNDLED, Algorithm.DFLASH),
        "seeded": build_engine(BUNDLED, limits=TreeLimits(24, 8, Expansion.CHAIN_SEEDED)),
        "wide": build_engine(BUNDLED, limits=TreeLimits(24, 8)),
    }.items():
        results = generate(engine, *batch)
        assert told(results) == expected, name
        assert all(result.finish is FinishReason.LENGTH for result in results.values())
        rounds[name] = sum(len(result.rounds) for result in results.values())
    assert rounds["wide"] < rounds["linear"]
    assert rounds["seeded"] < rounds["linear"]


def test_bfloat16_trees_differ_from_plain_decoding_by_near_ties_only():
    """Teacher-forced on one prefix, the tree's tokens are the plain model's top ones but for rounding."""
    batch = [request(str(i), encode(text), max_new_tokens=40) for i, text in enumerate(PYTHON[:4])]
    results = generate(build_engine(BUNDLED, dtype="bfloat16"), *batch)
    models = build_engine(BUNDLED, Algorithm.NONE, dtype="bfloat16").models
    differing = 0
    for one in batch:
        tokens, prompt = results[one.rid].tokens, len(one.input_ids)
        with torch.inference_mode():
            hidden, _ = models.append([*one.input_ids, *tokens[:-1]])
            logits = models.target.logits(hidden[prompt - 1 :]).float()
        top = logits.max(-1).values
        gap = top - logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert (gap <= 2.0 ** (top.abs().log2().floor() - 5)).all()
        differing += int((gap > 0).sum())
    assert differing <= 0.01 * 160
    assert max(stats.accepted for result in results.values() for stats in result.rounds) > 2


def encode(text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(BUNDLED.target / "tokenizer.json")).encode(text).ids
