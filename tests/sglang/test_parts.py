"""The plugin's parts that need no SGLang: kernels beside their twins, options, capabilities, sampling."""

import argparse
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.ddtree.kernels.tree_builder import build_trees
from toolkit.ddtree.sglang import draft
from toolkit.ddtree.sglang.capabilities import RULES, Model, refusals
from toolkit.ddtree.sglang.draft import DraftCandidates, TreeDrafter, merge_shards
from toolkit.ddtree.sglang.kernels import RowMover, VerifyRows, place_rows, walk_trees
from toolkit.ddtree.sglang.options import (
    ENVIRONMENT,
    Attention,
    OptionError,
    TreeOptions,
    add_flags,
    options_of,
)
from toolkit.ddtree.sglang.requests import limits_of, problem_of
from toolkit.ddtree.sglang.sampling import target_tokens
from toolkit.ddtree.sglang.tail import Tails, Verified
from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.tree import BatchLimits, ancestor_mask, positions, topk_logprobs
from toolkit.ddtree.tree import build_trees as plain_trees
from toolkit.ddtree.types import Expansion, TreeLimits
from toolkit.ddtree.walk import walk

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted here, run by tests/gpu there")

BUDGET, RANKS, SLOTS, VOCABULARY = 12, 4, 5, 40
LIMITS = (TreeLimits(12, 4), TreeLimits(5, 1, Expansion.CHAIN), TreeLimits(7, 3, Expansion.CHAIN_SEEDED))


@pytest.fixture(scope="module")
def grown():
    torch.manual_seed(5)
    logprobs, tokens = topk_logprobs(torch.randn(len(LIMITS), SLOTS, VOCABULARY), RANKS)
    roots = torch.tensor([3, 9, 1])
    return build_trees(logprobs, tokens.contiguous(), roots, BatchLimits.of(LIMITS), BUDGET)


@pytest.fixture(scope="module")
def placed(grown):
    trees, links = grown
    lengths = torch.tensor([6, 0, 11])
    table = torch.randperm(4 * 64).to(torch.int32).view(4, 64)
    mask = torch.full((4000,), 7, dtype=torch.uint8)
    rows = place_rows(trees, links, lengths, table, torch.tensor([2, 0, 3]), mask)
    return trees, lengths, table, mask, rows


def test_rows_stand_where_the_plain_twins_put_them(placed):
    trees, lengths, table, _, rows = placed
    width = BUDGET + 1
    assert torch.equal(rows.positions, positions(trees, lengths))
    for request, (row, length) in enumerate(zip([2, 0, 3], lengths.tolist(), strict=True)):
        assert rows.slots[request].tolist() == table[row, length : length + width].tolist()


def test_the_mask_is_the_ancestors_at_each_requests_place(placed):
    """SGLang's FULL_MASK: a request's rows hold its prefix, which is left as it was, and then its tree."""
    trees, lengths, _, mask, _ = placed
    expected = ancestor_mask(trees)
    width, start = BUDGET + 1, 0
    for request, length in enumerate(lengths.tolist()):
        cells = mask[start : start + width * (length + width)].view(width, length + width)
        assert torch.equal(cells[:, length:].bool(), expected[request])
        assert (cells[:, :length] == 7).all()
        start += cells.numel()
    assert (mask[start:] == 7).all()


@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
def test_the_walk_is_that_of_the_plain_twin(placed, luck):
    trees, lengths, _, _, rows = placed
    generator = torch.Generator().manual_seed(int(luck * 10))
    targets = torch.randint(0, VOCABULARY, trees.tokens.shape, generator=generator)
    for request in range(len(LIMITS)):  # let many nodes be followed by one of their children
        for node in range(1, int(trees.counts[request]) + 1):
            if torch.rand((), generator=generator) < luck:
                targets[request, trees.parents[request, node]] = trees.tokens[request, node]
    expected = walk(trees, targets)
    commit = walk_trees(trees, targets, rows.slots, lengths, SLOTS + 1)
    assert torch.equal(commit.lengths.long(), expected.accepted + 1)
    assert torch.equal(commit.bonus, expected.bonus)
    assert torch.equal(commit.seq_lens, lengths + expected.accepted + 1)
    committed = expected.committed(trees)
    assert torch.equal(commit.tokens, committed.clamp(min=0))
    own = torch.arange(SLOTS + 1).expand_as(expected.path)
    path = torch.where(expected.path >= 0, expected.path, own)
    width = BUDGET + 1
    assert torch.equal(commit.rows, path + torch.arange(len(LIMITS))[:, None] * width)
    assert torch.equal(commit.sources, rows.slots.gather(1, path))
    assert luck == 0 or commit.lengths.max() > 2


def test_rows_move_as_if_all_were_read_first():
    """A row can be one node's target and another's source."""
    buffers = [torch.arange(40 * 6.0).view(40, 2, 3), torch.arange(40 * 300, dtype=torch.int32).view(40, 300)]
    before = [buffer.clone() for buffer in buffers]
    targets = torch.tensor([[4, 5, 6, 7], [20, 21, 22, 23]])
    sources = torch.tensor([[4, 6, 7, 9], [20, 21, 30, 22]])
    RowMover(buffers)(sources, targets)
    for buffer, old in zip(buffers, before, strict=True):
        old[targets.flatten()] = old[sources.flatten()]
        assert torch.equal(buffer, old)


def test_a_recorded_tail_reads_what_then_lies_in_its_tensors(grown, placed):
    """Recorded functions are run by hand: each may read nothing but what stays in place."""
    trees, lengths, _, _, rows = placed
    width, kept = BUDGET + 1, []
    hidden = torch.randn(len(LIMITS) * width, 2)

    def keep(commit, own, states, positions):
        kept.append((commit.sources.clone(), own.slots.clone(), states, positions.clone()))

    tails = Tails(keep, len(LIMITS), width, SLOTS + 1, "cpu", record=lambda function: function)
    tails.add(Verified(trees, hidden))
    assert not tails.serves(trees, rows, hidden)  # these rows stand somewhere else
    assert tails.rows_of(2) is None
    own = tails.rows_of(len(LIMITS))
    assert tails.serves(trees, own, hidden)
    assert not tails.serves(trees, own, hidden.clone())
    assert not tails.serves(replace(trees, parents=trees.parents.clone()), own, hidden)

    first = None
    for seed in (1, 2):
        targets = torch.randint(
            0, VOCABULARY, trees.tokens.shape, generator=torch.Generator().manual_seed(seed)
        )
        targets[:, 0] = trees.tokens[:, seed]  # a child of the root, or not
        own.slots.copy_(rows.slots + seed)
        own.lengths.copy_(lengths + seed)
        tails.chosen_of(len(LIMITS)).copy_(targets)
        commit = tails.run(len(LIMITS))
        expected = walk_trees(trees, targets, rows.slots + seed, lengths + seed, SLOTS + 1)
        for name in ("tokens", "lengths", "bonus", "seq_lens", "rows", "sources"):
            assert torch.equal(getattr(commit, name), getattr(expected, name)), name
        sources, slots, states, positions = kept.pop()
        assert torch.equal(sources, expected.sources)
        assert torch.equal(slots, own.slots)
        assert states is hidden
        steps = torch.arange(SLOTS + 1)
        assert torch.equal(positions.view(len(LIMITS), -1), (lengths + seed)[:, None] + steps)
        first = first or (commit, commit.tokens.clone())
    assert torch.equal(first[0].tokens, first[1])  # what a step told stays as it is


def test_a_walk_stays_in_its_requests_rows_whatever_a_tree_says_of_its_size(grown, placed):
    """What is recorded runs over trees of a graph that was captured and never ran: they hold anything."""
    trees, lengths, _, _, rows = placed
    tokens, parents = trees.tokens.clone(), trees.parents.clone()
    tokens[0, 1:], tokens[1], parents[1] = -5, 7, 0  # the next request's rows would match
    targets = torch.full_like(tokens, 7)
    counts = torch.full_like(trees.counts, 1 << 30)
    commit = walk_trees(
        replace(trees, tokens=tokens, parents=parents, counts=counts), targets, rows.slots, lengths, SLOTS + 1
    )
    first = torch.arange(len(LIMITS)).unsqueeze(1) * (BUDGET + 1)
    assert ((commit.rows >= first) & (commit.rows < first + BUDGET + 1)).all()
    assert torch.isin(commit.sources, rows.slots).all()
    assert commit.lengths[0] == 1


def test_rows_of_a_tail_begin_where_nobodys_rows_are():
    """What is recorded also runs while it is recorded: it may write to no request's rows."""
    tails = Tails(lambda *_: None, 3, BUDGET + 1, SLOTS + 1, "cpu", record=lambda function: function)
    assert (tails.rows.slots == 0).all()
    assert isinstance(tails.rows.first(2), VerifyRows)


def test_rows_that_are_no_words_are_refused():
    with pytest.raises(ValueError, match="rows of 3 bytes"):
        RowMover([torch.zeros(8, 3, dtype=torch.uint8)])


def test_shards_of_the_vocabulary_give_the_candidates_of_the_whole():
    logits = torch.randn(6, 64).mul(4).round().div(4)  # with equal logits
    expected = topk_logprobs(logits, RANKS)
    parts = [logits[:, :32], logits[:, 32:]]
    local = [topk_logprobs(part, RANKS)[1] for part in parts]
    values = torch.stack([part.gather(1, tokens) for part, tokens in zip(parts, local, strict=True)])
    tokens = torch.stack([local[0], local[1] + 32])
    sums = torch.stack([part.logsumexp(1) for part in parts])
    logprobs, best = merge_shards(values, tokens, sums)
    assert torch.equal(best, expected[1])
    assert torch.allclose(logprobs, expected[0], atol=1e-6)


def test_a_graph_reads_the_limits_of_each_batch(monkeypatch):
    """The captured function is run by hand: it may read nothing but what stays in place."""
    monkeypatch.setattr(
        draft, "topk_logprobs", lambda x, k: tuple(part.contiguous() for part in topk_logprobs(x, k))
    )
    weight, hidden = torch.randn(VOCABULARY, 8), torch.randn(2 * (SLOTS + 1), 8)
    candidates = DraftCandidates(weight, VOCABULARY, 0, SLOTS + 1, RANKS, None)
    drafter = TreeDrafter(candidates, SLOTS + 1, TreeLimits(BUDGET, RANKS), 2, "cpu")
    ids = torch.randint(0, VOCABULARY, (2 * (SLOTS + 1),))
    roots = ids.view(2, -1)[:, 0]
    for limits in (LIMITS[:2], LIMITS[1:], LIMITS[:1]):
        drafter.prepare(limits)
        drafter(hidden, ids)  # the capture, which reads the static limits as a replay would
        replayed = drafter.replayed(2, len(limits))
        rows = len(limits) * (SLOTS + 1)
        expected = drafter.grow(hidden[:rows], roots[: len(limits)], limits)
        assert torch.equal(replayed.trees.tokens, expected.trees.tokens)
        assert torch.equal(replayed.trees.parents, expected.trees.parents)
        assert torch.equal(replayed.links.ancestors, expected.links.ancestors)
        assert torch.equal(replayed.tokens, expected.tokens)
        assert torch.equal(replayed.logprobs, expected.logprobs)


@pytest.mark.parametrize("expansion", [Expansion.TRANSITION, Expansion.BEST_FIRST])
def test_a_transition_table_serves_the_requests_that_ask_for_it(monkeypatch, expansion):
    """Against the plain builder, which goes by the same table; without it the trees are others."""
    monkeypatch.setattr(
        draft, "topk_logprobs", lambda x, k: tuple(part.contiguous() for part in topk_logprobs(x, k))
    )
    torch.manual_seed(4)
    left, right = torch.randn(2, VOCABULARY, 6).mul(2).unbind()
    table = TransitionTable(left, right, torch.linspace(0.2, 1.0, SLOTS))
    candidates = DraftCandidates(torch.randn(VOCABULARY, 8), VOCABULARY, 0, SLOTS + 1, RANKS, None)
    own = TreeLimits(BUDGET, RANKS, Expansion.TRANSITION)
    limits = (TreeLimits(BUDGET, RANKS, expansion), TreeLimits(7, 2, expansion))
    hidden, roots = torch.randn(2 * (SLOTS + 1), 8), torch.tensor([3, 5])
    drafter = TreeDrafter(candidates, SLOTS + 1, own, 2, "cpu", table)
    grown = drafter.grow(hidden, roots, limits)
    batch = BatchLimits.of(limits)
    children = table.rank_children(grown.logprobs, grown.tokens, roots, batch.topk_cap)
    expected = plain_trees(grown.logprobs, grown.tokens, roots, batch, BUDGET, children)
    assert torch.equal(grown.trees.tokens, expected.tokens)
    assert torch.equal(grown.trees.parents, expected.parents)
    without = TreeDrafter(candidates, SLOTS + 1, own, 2, "cpu").grow(hidden, roots, limits)
    same = torch.equal(without.trees.tokens, grown.trees.tokens)
    assert same == (expansion is Expansion.BEST_FIRST)


def info(**given):
    values = {"temperatures": torch.ones(2, 1), "top_ks": torch.tensor([1 << 30, 1 << 30])}
    values |= {"top_ps": torch.ones(2), "min_ps": torch.zeros(2), "logit_bias": None, "is_all_greedy": False}
    needs = dict.fromkeys(("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"), False)
    return SimpleNamespace(**values | needs | given)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, 6),
        ({"top_ks": torch.tensor([3, 3]), "need_top_k_sampling": True}, 3),
        ({"top_ps": torch.full((2,), 0.7), "need_top_p_sampling": True}, 2),
        ({"min_ps": torch.full((2,), 0.2), "need_min_p_sampling": True}, 4),
    ],
)
def test_draws_have_the_targets_distribution(filters, kept):
    torch.manual_seed(11)
    probabilities = torch.tensor([0.42, 0.28, 0.14, 0.1, 0.05, 0.01])
    weights = torch.where(torch.arange(6) < kept, probabilities, 0.0)
    draws, width = 20_000, 3
    logits = probabilities.log().expand(2 * width, 6)
    counts = torch.zeros(6)
    for _ in range(20):
        many = target_tokens(logits.repeat_interleave(draws // 120, 0), spread(filters, draws // 120), width)
        counts += torch.bincount(many.flatten(), minlength=6)
    share = weights / weights.sum()
    chance = ((counts - counts.sum() * share) ** 2 / (counts.sum() * share).clamp(min=1e-9))[:kept].sum()
    assert counts[kept:].sum() == 0
    assert chance < 25  # chi-square, at most 5 degrees of freedom: one in 7,000


def spread(filters, times):
    """`info` for `times` as many requests."""
    one = info(**filters)
    tensors = {name: value for name, value in vars(one).items() if isinstance(value, torch.Tensor)}
    return SimpleNamespace(
        **vars(one) | {name: value.repeat_interleave(times, 0) for name, value in tensors.items()}
    )


def test_a_greedy_request_beside_a_sampled_one_stays_greedy():
    """Even where two logits have the same probability in float32."""
    logits = torch.randn(2 * 5, 30)
    logits[3] = 0.0
    logits[3, 7], logits[3, 20] = 0.1, torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    mixed = info(top_ks=torch.tensor([1, 1 << 30]), need_top_k_sampling=True)
    tokens = target_tokens(logits.clone(), mixed, 5)
    assert torch.equal(tokens[0], logits[:5].argmax(-1))
    assert tokens[0, 3] == 20


def flags(*argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--speculative-algorithm")
    add_flags(parser)
    return parser.parse_args(argv)


def test_flags_win_over_the_environment_and_reach_the_next_process(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"budget": 24, "topk_cap": 4}))
    chosen = options_of(flags("--speculative-algorithm", "ddtree", "--speculative-ddtree-budget", "32"))
    assert chosen == TreeOptions(32, 4)
    chosen.to_environment()
    assert TreeOptions.from_environment() == chosen


def test_whose_attention_verifies_is_left_to_the_device_or_chosen(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "{}")
    tree = ["--speculative-algorithm", "DDTREE"]
    assert options_of(flags(*tree)).attention is None
    chosen = options_of(flags(*tree, "--speculative-ddtree-attention", "backend"))
    assert chosen.attention is Attention.BACKEND
    for options in (chosen, TreeOptions()):
        options.to_environment()
        assert TreeOptions.from_environment() == options


def test_a_debug_file_is_written_where_the_metrics_are_asked_for(tmp_path):
    path = str(tmp_path / "debug.jsonl")
    given = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-debug-file", path]
    assert options_of(flags(*given)).debug_file is None
    assert options_of(flags(*given, "--speculative-ddtree-debug-metrics")).debug_file == path


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (
            ["--speculative-ddtree-budget", "32"],
            "--speculative-ddtree-budget needs --speculative-algorithm DDTREE",
        ),
        (["--speculative-algorithm", "DDTREE", "--speculative-ddtree-topk-cap", "0"], "topk_cap is 0"),
        (["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "1025"], "from 1 to 1024"),
        (["--speculative-algorithm", "DDTREE", "--speculative-ddtree-debug-metrics"], "debug-file FILE"),
        (["--speculative-ddtree-debug-metrics"], "--speculative-ddtree-debug-metrics needs"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(argv, named):
    with pytest.raises(OptionError, match=named):
        options_of(flags(*argv))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"budgets": 3}', '{"budget": "3"}', '{"budget": true}', '{"attention": "fast"}']
)
def test_an_environment_that_holds_no_options_is_refused(monkeypatch, text):
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(OptionError, match=ENVIRONMENT):
        TreeOptions.from_environment()


def request(**given):
    sampling = {"min_new_tokens": 0, "custom_params": None}
    req = {"return_hidden_states": False, "custom_logit_processor": None, "tokenizer": None}
    sampling |= {name: value for name, value in given.items() if name in sampling}
    req |= {name: value for name, value in given.items() if name in req}
    return SimpleNamespace(sampling_params=SimpleNamespace(**sampling), **req)


@pytest.mark.parametrize(
    "asked",
    [
        {"min_new_tokens": 2},
        {"return_hidden_states": True},
        {"custom_logit_processor": "x"},
        {"custom_params": {"ddtree": {"topk_cap": 9}}},
        {"custom_params": {"ddtree": {"expansion": "transition"}}},
        {"custom_params": {"ddtree": {"debug_file": "/tmp/x"}}},
        {"custom_params": {"ddtree": {"check_prefix": "x"}}},
    ],
)
def test_a_request_that_cannot_be_served_is_named(asked):
    problem = problem_of(request(**asked), TreeOptions(16, 8))
    assert problem is not None
    assert next(iter(asked)) in problem


def test_a_least_length_needs_a_tokenizer():
    assert problem_of(request(min_new_tokens=2, tokenizer=object()), TreeOptions(16, 8)) is None


def test_transition_is_offered_where_it_is_the_servers_own():
    asked = {"ddtree": {"expansion": "transition"}}
    assert problem_of(request(custom_params=asked), TreeOptions(16, 8, Expansion.TRANSITION)) is None


def test_requests_have_limits_of_their_own():
    own = TreeOptions(16, 8)
    asked = [request(), request(custom_params={"ddtree": {"budget": 9}}), request(custom_params={"other": 1})]
    assert all(problem_of(req, own) is None for req in asked)
    assert limits_of(asked, own) == (own.limits, TreeLimits(9, 8), own.limits)


def arguments(**given):
    """Server arguments that nothing stands against."""
    return SimpleNamespace(**{rule.attribute: rule.allowed[0] for rule in RULES} | given)


def test_nothing_stands_against_triton():
    for architecture in ("MHA", "MLA"):
        assert refusals(arguments(), ("triton", "triton"), Model(architecture, None, recurrent=False)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.attribute)
def test_every_rule_refuses(rule):
    found = refusals(arguments(**{rule.attribute: "other"}), ("triton", "triton"), Model("MHA", None, False))
    assert len(found) == 1
    assert "--" + rule.attribute.replace("_", "-") in found[0]


@pytest.mark.parametrize(
    ("backends", "model", "named"),
    [
        (("fa3", "fa3"), Model("MHA", None, False), "fa3"),
        (("flashinfer", "flashinfer"), Model("MLA", None, False), "Set --attention-backend triton"),
        (("unheard", "unheard"), Model("MHA", None, False), "not known to take tree masks"),
        (("triton", "fa3"), Model("MHA", None, False), "attention backends differ"),
        (("triton", "triton"), Model("MHA", 4096, False), "sliding window of 4096"),
        (("triton", "triton"), Model("MHA", None, True), "recurrent layers"),
    ],
)
def test_backends_and_models_without_tree_masks_are_refused(backends, model, named):
    assert any(named in line for line in refusals(arguments(), backends, model))
