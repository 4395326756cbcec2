"""How requests end, what is refused, prefix reuse, sampling in every mode, and requests gone bad."""

import math
from dataclasses import replace

import pytest
import torch

from tests.ddtree.conftest import BUNDLED, build_engine, collect, generate, request
from toolkit.ddtree.engine import Engine
from toolkit.ddtree.models.qwen3 import Qwen3Target
from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, FinishReason, TreeLimits

PROMPT = [1, 2, 3, 4, 5, 6, 7]
MODES = [Algorithm.DFLASH, Algorithm.DDTREE]


@pytest.fixture(scope="module")
def engines(lucky_pair):
    return {mode: build_engine(lucky_pair, mode) for mode in Algorithm}


def one(engine, **changes):
    return generate(engine, request("r", PROMPT, **changes))["r"]


@pytest.mark.parametrize("mode", MODES)
def test_every_stop_token_ends_where_plain_decoding_ends(engines, mode):
    inside = 0
    for token in range(16):
        plain = one(engines[Algorithm.NONE], stop_token_ids=frozenset({token}))
        result = one(engines[mode], stop_token_ids=frozenset({token}))
        assert result.told == plain.told
        if result.finish is FinishReason.STOP:
            assert (result.tokens[-1], result.matched) == (token, token)
            inside += result.rounds != [] and 1 + sum(r.committed for r in result.rounds) > len(result.tokens)
    assert inside, "no stop token ever fell inside an accepted path"


@pytest.mark.parametrize("mode", Algorithm)
def test_every_token_limit_is_exact(engines, mode):
    whole = one(engines[Algorithm.NONE]).tokens
    inside = 0
    for limit in range(len(whole)):
        result = one(engines[mode], max_new_tokens=limit)
        assert (result.tokens, result.finish, result.matched) == (whole[:limit], FinishReason.LENGTH, None)
        inside += result.rounds != [] and 1 + sum(r.committed for r in result.rounds) > limit
    assert inside or mode is Algorithm.NONE, "no limit ever fell inside an accepted path"


@pytest.mark.parametrize("mode", Algorithm)
def test_stop_token_at_the_token_limit_is_a_stop(engines, mode):
    whole = one(engines[Algorithm.NONE]).tokens
    for limit in range(1, len(whole)):
        stop = frozenset({whole[limit - 1]})
        result = one(engines[mode], max_new_tokens=limit, stop_token_ids=stop)
        assert result.finish is FinishReason.STOP
        assert result.tokens == whole[: whole.index(whole[limit - 1]) + 1]


@pytest.mark.parametrize("mode", Algorithm)
def test_end_token_and_ignore_eos(engines, mode):
    """The lucky pair's end token is 0; bias makes it likely."""
    bias = {0: 8.0}
    ended = one(engines[mode], ignore_eos=False, logit_bias=bias)
    assert (ended.tokens[-1], ended.finish, ended.matched) == (0, FinishReason.STOP, 0)
    ignored = one(engines[mode], ignore_eos=True, logit_bias=bias)
    assert ignored.finish is FinishReason.LENGTH
    assert ignored.tokens[: len(ended.tokens)] == ended.tokens
    held = one(engines[mode], ignore_eos=False, logit_bias=bias, min_new_tokens=9)
    assert 0 not in held.tokens[:9]
    assert (len(held.tokens) > 9, held.tokens[-1]) == (True, 0)


@pytest.mark.parametrize("mode", Algorithm)
@pytest.mark.parametrize("length", [1, 30, 38, 39])
def test_output_ends_at_the_context_limit(lucky_pair, mode, length):
    prompt = [(5 * i) % 16 for i in range(length)]
    plain = build_engine(lucky_pair, Algorithm.NONE)
    expected = generate(plain, request("r", prompt, max_new_tokens=40 - length))["r"].tokens
    engine = build_engine(lucky_pair, mode, context_length=40)
    result = generate(engine, request("r", prompt, max_new_tokens=1000))["r"]
    assert (result.tokens, result.finish) == (expected, FinishReason.LENGTH)
    assert length + len(result.tokens) == 40


def test_stop_strings_across_tokens_and_rounds():
    engines = {mode: build_engine(BUNDLED, mode) for mode in Algorithm}
    encode, decode = engines[Algorithm.NONE].encode, engines[Algorithm.NONE].decode
    prompt = encode("import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path =")
    whole = generate(engines[Algorithm.NONE], request("r", prompt, max_new_tokens=24))["r"].tokens
    text = decode(whole)
    for start in range(0, len(text) - 12, 8):
        stop = text[start : start + 7]
        results = [
            generate(engine, request("r", prompt, max_new_tokens=24, stop=(stop, "never in it")))["r"]
            for engine in engines.values()
        ]
        assert all(result.told == results[0].told for result in results)
        assert (results[0].finish, results[0].matched) == (FinishReason.STOP, stop)
        kept = decode(results[0].tokens)
        assert text.startswith(kept)
        assert kept.index(stop) == text.index(stop)
        assert stop not in decode(results[0].tokens[:-1])  # ended by the very token that completes it


SAMPLING = {
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 2.0, "top_k": 3},
    "top_p": {"temperature": 2.0, "top_p": 0.5},
    "min_p": {"temperature": 2.0, "min_p": 0.2},
    "filters": {"temperature": 3.0, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "presence": {"presence_penalty": 3.0},
    "bias": {"logit_bias": {3: -100.0, 5: -100.0}},
    "everything": {
        "temperature": 1.5, "top_k": 8, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {2: 2.0}, "min_new_tokens": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameters_act_the_same_in_every_mode_and_batch(engines, name):
    params = {"sampling_seed": 11, **SAMPLING[name]}
    plain = one(engines[Algorithm.NONE], **params)
    unchanged = one(engines[Algorithm.NONE], temperature=params.get("temperature", 0.0), sampling_seed=11)
    if name not in ("temperature", "hot"):
        assert plain.tokens != unchanged.tokens, "the parameter has no effect, so nothing was shown"
    else:
        assert plain.tokens != one(engines[Algorithm.NONE], **{**params, "sampling_seed": 12}).tokens
    for mode in MODES:
        assert one(engines[mode], **params).told == plain.told
    others = [request(f"other{i}", [i, 3], temperature=1.0, sampling_seed=i) for i in range(3)]
    beside = generate(engines[Algorithm.DDTREE], others[0], request("r", PROMPT, **params), *others[1:])
    assert beside["r"].told == plain.told


def test_requests_without_a_seed_differ_but_runs_repeat(lucky_pair):
    def run(random_seed):
        engine = build_engine(lucky_pair, random_seed=random_seed)
        return [one(engine, temperature=2.0).tokens for _ in range(3)]

    first = run(0)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert run(0) == first
    assert run(1) != first


def test_prefix_cache_gives_the_same_text(lucky_pair):
    plain = build_engine(lucky_pair, Algorithm.NONE)
    for mode in Algorithm:
        engine = build_engine(lucky_pair, mode, prefix_cache_tokens=4096)
        first = one(engine)
        again = one(engine)
        assert (first.cached, again.cached) == (0, len(PROMPT) - 1)
        assert again.told == first.told
        longer = [*PROMPT, *first.tokens]
        follow = request("follow", longer)
        result = generate(engine, follow)["follow"]
        assert len(longer) - 8 <= result.cached < len(longer)
        assert result.told == generate(plain, follow)["follow"].told
        assert generate(engine, replace(follow, extra_key="salt"))["follow"].cached == 0
        assert engine.stats.cached_tokens > 0
        engine.flush_cache()
        assert engine.stats.cached_tokens == 0
        assert generate(engine, follow)["follow"].cached == 0


def test_kv_move_left_out_reaches_others_through_the_prefix_cache(lucky_pair, monkeypatch):
    """Why lossless probes need a salt of their own: the cache hands on the rows under suspicion."""
    plain = build_engine(lucky_pair, Algorithm.NONE)
    engine = build_engine(lucky_pair, limits=TreeLimits(16, 8), prefix_cache_tokens=4096)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_compact", lambda self, paths: None)
        spoilt = one(engine, max_new_tokens=60)
    follow = request("follow", [*PROMPT, *spoilt.tokens], max_new_tokens=30)
    expected = generate(plain, follow)["follow"].tokens
    assert generate(engine, replace(follow, extra_key="salt"))["follow"].tokens == expected
    assert generate(engine, follow)["follow"].tokens != expected


def test_abort_ends_waiting_and_running_requests(lucky_pair):
    engine = build_engine(lucky_pair, max_running_requests=2)
    expected = generate(engine, request("b", [3, 1]))["b"].told
    for rid in "abc":
        engine.add(request(rid, [3, 1]))
    results = {}
    collect(results, engine.step())
    engine.abort("a")  # running
    engine.abort("c")  # waiting
    engine.abort("nobody")
    while engine.has_work:
        collect(results, engine.step())
    assert {rid: result.finish for rid, result in results.items()} == {
        "a": FinishReason.ABORT, "b": FinishReason.LENGTH, "c": FinishReason.ABORT,
    }  # fmt: skip
    assert results["b"].told == expected
    assert not engine.step()


@pytest.mark.parametrize("mode", Algorithm)
def test_request_whose_logits_are_no_numbers_ends_alone(lucky_pair, mode):
    engine = build_engine(lucky_pair, mode)
    prompts = {"a": [3, 1, 4], "bad": [7, 7, 7, 7, 7], "c": [2]}
    batch = [request(rid, prompt) for rid, prompt in prompts.items()]
    expected = {
        rid: generate(engine, r)[rid].told for rid, r in zip(prompts, batch, strict=True) if rid != "bad"
    }
    results = {}
    for r in batch:
        engine.add(r)
    collect(results, engine.step())
    collect(results, engine.step())
    slot = [running.request.rid for running in engine._running].index("bad")
    with torch.inference_mode():
        engine.models._caches[0]._data[:, slot, :2] = math.nan
    while engine.has_work:
        collect(results, engine.step())
    assert results["bad"].finish is FinishReason.ABORT
    assert {rid: results[rid].told for rid in expected} == expected
    late = generate(engine, request("late", [1] * 9), *(replace(r, rid=f"{r.rid}2") for r in batch))
    assert all(result.finish is FinishReason.LENGTH for result in late.values())
    assert late["a2"].told == expected["a"]


@pytest.mark.parametrize("mode", Algorithm)
def test_a_free_slot_holds_zeros_whatever_ran_there(lucky_pair, mode):
    """Requests of unequal lengths, some from the prefix cache and one taken out, that end in any order."""
    engine = build_engine(lucky_pair, mode, max_running_requests=3, prefix_cache_tokens=64)
    waits = [request(f"r{i}", PROMPT[: 1 + i % 7] * (1 + i), max_new_tokens=3 * (i % 4)) for i in range(9)]
    occupied = 0
    for r in [*waits, *(replace(r, rid=f"{r.rid} again") for r in waits)]:
        engine.add(r)
    while engine.has_work:
        engine.step()
        engine.abort("r7")
        running = len(engine._running)
        for cache in engine.models._caches:
            occupied = max(occupied, cache._data.shape[1])
            assert not cache._data[:, running:].any()
            assert all(layer.any() for slot in cache._data[:, :running].unbind(1) for layer in slot)
    assert occupied == 3
    assert engine.stats.cached_tokens


def test_prefill_whose_logits_are_no_numbers_ends_that_request(lucky_pair, monkeypatch):
    engine = build_engine(lucky_pair)
    monkeypatch.setattr(Qwen3Target, "logits", lambda self, hidden: torch.full((len(hidden), 16), math.nan))
    assert one(engine).finish is FinishReason.ABORT
    monkeypatch.undo()
    assert one(engine).finish is FinishReason.LENGTH


REFUSED = {
    "no tokens": {"prompt": []},
    "token ids outside 0..15": {"prompt": [16]},
    "token ids outside 0..15 ": {"prompt": [-1]},
    "must fit the context of 512": {"prompt": [1] * 512},
    "max_new_tokens -1": {"max_new_tokens": -1},
    "min_new_tokens 9 is outside 0..8": {"max_new_tokens": 8, "min_new_tokens": 9},
    "temperature -1": {"temperature": -1.0},
    "temperature nan": {"temperature": math.nan},
    "temperature inf": {"temperature": math.inf},
    "top_p 0 leaves no token": {"top_p": 0.0},
    "top_p 1.5": {"top_p": 1.5},
    "top_k 0": {"top_k": 0},
    "min_p nan": {"min_p": math.nan},
    "repetition_penalty 0": {"repetition_penalty": 0.0},
    "presence_penalty nan": {"presence_penalty": math.nan},
    "token id 16": {"logit_bias": {16: 1.0}},
    "not a finite number": {"logit_bias": {1: math.inf}},
    "token id 99": {"stop_token_ids": frozenset({99})},
    "stop holds an empty string": {"stop": ("",)},
    "has no tokenizer": {"stop": ("x",)},
    "budget 17 is outside 1..16": {"limits": TreeLimits(17, 8)},
    "budget 0 is outside": {"limits": TreeLimits(0, 8)},
    "topk_cap 9 is outside 1..8": {"limits": TreeLimits(16, 9)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_requests_that_cannot_be_served_are_refused_by_name(engines, message):
    changes = dict(REFUSED[message])
    engine = engines[Algorithm.DDTREE]
    with pytest.raises(ValueError, match=message.strip().replace(".", r"\.")):
        engine.add(request("r", changes.pop("prompt", PROMPT), **changes))
    assert not engine.has_work


def test_tree_limits_need_ddtree_and_ids_must_be_free(engines):
    with pytest.raises(
        ValueError, match="tree limits need algorithm DDTREE; this engine decodes with DFLASH"
    ):
        engines[Algorithm.DFLASH].add(request("r", PROMPT, TreeLimits(7, 1, Expansion.CHAIN)))
    engine = engines[Algorithm.DDTREE]
    engine.add(request("r", PROMPT))
    with pytest.raises(ValueError, match="request id 'r' is in use"):
        engine.add(request("r", PROMPT))
    engine.abort("r")
    engine.step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": TreeLimits(6, 8)}, "tree budget 6 is below 7"),
        ({"limits": TreeLimits(16, 0)}, "topk_cap 0 is below 1"),
        ({"context_length": 513}, "context_length 513 is outside 2..512"),
        ({"context_length": 1}, "context_length 1 is outside"),
        ({"max_running_requests": 0}, "max_running_requests 0 is below 1"),
        ({"prefix_cache_tokens": -1}, "prefix_cache_tokens -1 is below 0"),
        ({"block_size": 9}, "block size 9 is outside 2..8"),
        ({"block_size": 1}, "block size 1 is outside 2..8"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of float32, bfloat16"),
        ({"draft_model_path": None}, "algorithm DDTREE needs a draft model"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused_by_name(lucky_pair, changes, message):
    config = EngineConfig(lucky_pair.target, lucky_pair.drafter)
    with pytest.raises(ValueError, match=message):
        Engine(replace(config, **changes))
