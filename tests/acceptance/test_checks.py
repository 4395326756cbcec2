"""Each check passes on a sound server and fails on the fault that it is there for."""

import json
from dataclasses import replace
from importlib import import_module

import pytest

from toolkit.acceptance.checks import CHECKS
from toolkit.acceptance.checks.equality import same_tokens
from toolkit.acceptance.exchange import EndpointError
from toolkit.acceptance.probing import Output

RUN = {check.name: check.run for check in CHECKS}

# Faults of the server, the check that must notice, what it must say, and a word of its explanation.
FAULTS = [
    ({"empty": True}, "real_tokens", "failed", "nothing of use"),
    ({"constant": True}, "real_tokens", "failed", "same answer"),
    ({"constant": True, "dialect": "openai"}, "real_tokens", "failed", "same answer"),
    ({"repeat_every": 5}, "lossless", "failed", "instead of"),
    ({"wrong_in_batch": True}, "lossless", "failed", "batch of 16"),
    ({"ignore_salt": True, "no_flush": True}, "lossless", "inconclusive", "cache"),
    ({"tree_accepts": 1}, "lossless", "inconclusive", "too short"),
    ({"no_tokenize": True}, "lossless", "not_checked", "/tokenize"),
    ({"dialect": "openai"}, "lossless", "not_checked", "token ids"),
    ({"algorithm": "NONE"}, "lossless", "not_checked", "without speculation"),
    ({"echo_probes": True, "repeat_every": 5}, "lossless", "failed", "instead of"),
    ({"refuse_limits": True}, "chain_control", "failed", "above the server's own"),
    ({"wrong_chain": True}, "chain_control", "failed", "instead of"),
    ({"algorithm": "DFLASH"}, "chain_control", "not_checked", "DFLASH"),
    ({"dialect": "vllm"}, "chain_control", "not_checked", "unknown algorithm"),
    ({"tree_accepts": 1}, "tree_against_chain", "failed", "contains the chain"),
    ({"refuse_limits": True}, "tree_against_chain", "not_checked", "above the server's own"),
    ({"wrong_in_batch": True}, "batch_tokens", "failed", "instead of"),
    ({"wrong_in_batch": True, "dialect": "openai"}, "batch_tokens", "inconclusive", "texts differ"),
    ({"batch_accepts": 1}, "batch_acceptance", "failed", "captured graph"),
    ({"algorithm": "NONE"}, "batch_acceptance", "not_checked", "without speculation"),
    ({"drop_in_stream": True}, "streaming", "failed", ""),
    ({"drop_in_stream": True, "dialect": "vllm"}, "streaming", "failed", "streamed text differs"),
    ({"drop_in_stream": True, "dialect": "openai"}, "streaming", "failed", "streamed text differs"),
    ({"short_usage_in_stream": True, "dialect": "openai"}, "streaming", "failed", "reported by the stream"),
    ({"greedy_always": True}, "sampling", "failed", "dropped"),
    ({"failing_self_check": True}, "self_check", "failed", "mask is causal"),
    ({"dialect": "vllm"}, "self_check", "not_checked", "no self-check"),
    ({"count_twice": True}, "metrics", "failed", "more than once"),
    ({"count_twice": True, "dialect": "vllm"}, "metrics", "failed", "more than once"),
    ({"forget_counts": True}, "metrics", "failed", "less than sent"),
    ({"foreign_requests": 1}, "metrics", "not_judged", "other traffic"),
    ({"dialect": "openai"}, "metrics", "not_checked", "/metrics"),
    ({"foreign_requests": 1}, "tokens_per_second", "not_judged", "other traffic"),
    ({"foreign_running": 2}, "tokens_per_second", "not_judged", "none of ours"),
    ({"dialect": "openai"}, "acceptance_length", "not_checked", "verify steps"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "name", "status", "words"), FAULTS, ids=[f"{name}-{'-'.join(f)}" for f, name, *_ in FAULTS]
)
def test_a_fault_is_noticed(open_session, faults, name, status, words):
    session = open_session(**faults)
    if name in ("metrics", "tokens_per_second"):
        session.checkpoint()
        assert session.alone
        assert session.batch
    result = RUN[name](session)
    assert (result.name, result.status) == (name, status), result
    assert words in result.detail


@pytest.mark.parametrize("faults", [{"gauge_lags": 0.5}, {"gauge_jumps": True, "takes": 0.7}])
def test_a_gauge_that_lags_is_no_sign_of_others(open_session, faults):
    session = open_session(**faults)
    session.checkpoint()
    assert session.alone
    assert session.batch
    assert [RUN[name](session).status for name in ("tokens_per_second", "metrics")] == ["passed", "passed"]


def test_a_sound_server_passes_every_check(open_session):
    session = open_session({"max_new_tokens": 65})
    session.checkpoint()
    results = [check.run(session) for check in CHECKS]
    assert {result.status for result in results} == {"passed"}, results
    lossless = next(result for result in results if result.name == "lossless")
    assert lossless.status == "passed"
    assert lossless.measured["alone"]["positions"] == 512
    assert lossless.measured["batch"]["positions"] == 1024
    assert [check.name for check in CHECKS] == [result.name for result in results]
    assert [check.category for check in CHECKS] == [result.category for result in results]


def test_vllm_is_checked_through_its_completions(open_session):
    session = open_session({"requests": 151}, dialect="vllm")
    session.checkpoint()
    results = {check.name: check.run(session) for check in CHECKS}
    status = {name: result.status for name, result in results.items()}
    assert status == dict.fromkeys(status, "passed") | {
        "lossless": "inconclusive",  # these outputs are too short
        "chain_control": "not_checked",
        "tree_against_chain": "not_checked",
        "batch_acceptance": "not_checked",
        "self_check": "not_checked",
    }
    assert "too short" in results["lossless"].detail
    assert results["acceptance_length"].measured["acceptance_length"] == pytest.approx(8 / 3, abs=1e-3)
    assert {ask["salt"] is None for ask in session.stub.requests if ask["count"] == 1} == {False}


def test_probes_carry_a_fresh_salt_and_generations_none(open_session):
    session = open_session()
    RUN["lossless"](session)
    probes = [ask for ask in session.stub.requests if ask["count"] == 1]
    generations = [ask for ask in session.stub.requests if ask["count"] > 1]
    assert {ask["salt"] for ask in generations} == {None}
    assert None not in {ask["salt"] for ask in probes}
    assert len({ask["salt"] for ask in probes}) == 2  # the canary has its own
    assert all(ask["temperature"] == 0 for ask in session.stub.requests)


def test_an_incomplete_list_of_answers_is_an_error(open_session):
    with pytest.raises(EndpointError, match="otherwise"):
        RUN["lossless"](open_session(short_lists=True))


def test_kept_connections_may_be_closed_at_any_time(open_session):
    session = open_session(hang_up=True)
    assert RUN["batch_tokens"](session).status == "passed"
    assert RUN["tokens_per_second"](session).status == "passed"


def test_salts_differ_between_runs(open_session):
    assert open_session().salt != open_session().salt


def test_without_an_honoured_salt_the_cache_is_flushed_before_probing(open_session):
    session = open_session(ignore_salt=True, echo_probes=True, repeat_every=5)
    result = RUN["lossless"](session)
    assert session.isolation == "flush"
    assert session.stub.flushes >= 2
    assert result.status == "failed"


def test_near_ties_pass_when_shown_by_a_biased_probe(open_session):
    session = open_session({"max_new_tokens": 65}, near_ties_flip=True)
    judgement = session.decoder.judge(session.alone.outputs, delta=1e-3)
    assert judgement.equal
    assert judgement.near_ties == len(judgement.differences) > 0
    biased = [ask for ask in session.stub.requests if ask["bias"]]
    assert {bias for ask in biased for bias in ask["bias"].values()} == {1e-3}


def test_near_ties_that_cannot_be_shown_leave_it_open(open_session):
    session = open_session({"max_new_tokens": 65}, ties_flip_in_batch=True, no_bias=True)
    result = RUN["batch_tokens"](session)
    assert result.status == "inconclusive", result
    assert "logit bias" in result.detail


def test_near_ties_between_batch_and_alone_pass(open_session):
    session = open_session({"max_new_tokens": 65}, ties_flip_in_batch=True)
    result = RUN["batch_tokens"](session)
    assert result.status == "passed", result
    assert result.measured["different"] > 0


@pytest.mark.parametrize(("accepts", "status"), [(1, "inconclusive"), (2, "passed")])
def test_hardly_any_speculation_proves_nothing(open_session, monkeypatch, accepts, status):
    monkeypatch.setattr(import_module("toolkit.acceptance.checks.lossless"), "MIN_POSITIONS", 64)
    result = RUN["lossless"](open_session(tree_accepts=accepts))
    assert result.status == status
    assert ("acceptance length is 1.00" in result.detail) == (status == "inconclusive")


def test_an_output_that_ends_early_is_a_fault(open_session):
    session = open_session()
    whole = session.alone
    cut = replace(whole.answers[2], output_ids=whole.answers[2].output_ids[:-2])
    short = replace(whole, answers=(*whole.answers[:2], cut, *whole.answers[3:]))
    result = same_tokens("x", session, whole, short, "the same")
    assert (result.status, result.detail) == ("failed", "prompt 2: one output is shorter")


def test_the_control_finds_a_replaced_token(open_session):
    result = RUN["lossless_control"](open_session())
    assert (result.status, result.measured["found"]) == ("passed", True)


def test_the_control_fails_where_probes_are_blind(open_session):
    session = open_session()
    assert session.alone
    session.decoder.judge = lambda outputs, **_: _Blind()
    assert RUN["lossless_control"](session).status == "failed"


class _Blind:
    differences = ()


def test_a_replaced_token_is_named(open_session):
    session = open_session()
    outputs = session.alone.outputs
    wrong = (outputs[3].tokens[4] + 1) % 509
    outputs[3] = Output(outputs[3].prompt, (*outputs[3].tokens[:4], wrong, *outputs[3].tokens[5:]))
    judgement = session.decoder.judge(outputs, delta=1e-3)
    first = judgement.differences[0]
    assert (first.output, first.position, first.token) == (3, 4, wrong)
    assert first.near_tie is False
    assert not judgement.equal


def test_the_chain_is_asked_for_by_per_request_limits(open_session):
    session = open_session()
    assert RUN["chain_control"](session).status == "passed"
    limits = [ask["tree"] for ask in session.stub.requests if ask["tree"]]
    assert limits == [{"budget": 7, "topk_cap": 1, "expansion": "chain"}] * 16


def test_a_batch_really_runs_at_once(open_session):
    session = open_session(wrong_in_batch=True)
    pairs = zip(session.alone.answers, session.batch.answers[:8], strict=True)
    assert sum(a.output_ids != b.output_ids for a, b in pairs) == 8


def test_an_unseeded_sampler_is_only_noted_on_other_servers(open_session):
    result = RUN["sampling"](open_session(new_seed_always=True))
    assert result.status == "passed"
    assert "best effort" in result.detail


@pytest.mark.parametrize(("minimum", "status"), [(2.6, "passed"), (2.7, "failed")])
def test_acceptance_length_has_a_threshold(open_session, minimum, status):
    session = open_session({"min_acceptance_length": minimum})  # 8 tokens in 3 steps
    assert RUN["acceptance_length"](session).status == status


@pytest.mark.parametrize(("minimum", "status"), [(1.0, "passed"), (1e9, "failed")])
def test_tokens_per_second_has_a_threshold(open_session, minimum, status):
    session = open_session({"min_tokens_per_second": minimum, "requests": 32})
    assert RUN["tokens_per_second"](session).status == status


def base_report(session, path, **load):
    """A base release's report that accepted 4 tokens a step, on the same prompts and load."""
    load = {"concurrency": 16, "tokens": 16, "compared_tokens": 9} | load
    length = {"tree": {"value": 4.0}}
    report = {"prompts": {"sha256": session.prompts_hash}, "load": load, "acceptance_length": length}
    report["checks"] = []
    path.write_text(json.dumps(report | {"tokens_per_second": 1e9}))


@pytest.mark.parametrize(("tolerance", "status"), [(0.3, "failed"), (0.35, "passed")])
def test_the_base_report_sets_the_floor(open_session, tmp_path, tolerance, status):
    path = tmp_path / "base.json"
    session = open_session({"base_reports": [str(path)], "tolerance": tolerance, "requests": 16})
    base_report(session, path)
    result = RUN["acceptance_length"](session)  # 8 tokens in 3 steps
    assert result.status == status
    assert "under the base's 4" in result.expected
    assert RUN["tokens_per_second"](session).status == "failed"


@pytest.mark.parametrize(("tolerance", "status"), [(None, "failed"), (0.5, "failed"), (1 - 1e-9, "passed")])
def test_tokens_per_second_may_have_a_tolerance_of_its_own(open_session, tmp_path, tolerance, status):
    path = tmp_path / "base.json"
    session = open_session({"base_reports": [str(path)], "speed_tolerance": tolerance, "requests": 16})
    base_report(session, path)
    assert RUN["tokens_per_second"](session).status == status
    assert RUN["acceptance_length"](session).status == "failed"  # still by `tolerance`


def reports(session, tmp_path, **first):
    """Two base reports, of which the first is changed so that it cannot judge."""
    paths = [tmp_path / "base.json", tmp_path / "earlier.json"]
    for path in paths:
        base_report(session, path)
    paths[0].write_text(json.dumps(json.loads(paths[0].read_text()) | first))
    return {"base_reports": [str(path) for path in paths]}


UNJUDGED = [{"name": "acceptance_length", "status": "not_judged"}]


@pytest.mark.parametrize("first", [{"acceptance_length": {"tree": None}}, {"checks": UNJUDGED}])
def test_a_figure_that_the_base_lacks_comes_from_the_release_before(open_session, tmp_path, first):
    settings = reports(open_session({}), tmp_path, **first)
    result = RUN["acceptance_length"](open_session(settings))
    assert result.status == "failed"
    assert result.measured["base"] == 4.0


def test_a_figure_that_no_base_has_is_not_compared(open_session, tmp_path):
    settings = reports(open_session({}), tmp_path, checks=UNJUDGED)
    settings["base_reports"].pop()
    result = RUN["acceptance_length"](open_session(settings))
    assert result.status == "passed"
    assert "beside other traffic" in result.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 5}, "other prompts"),
        ({"concurrency": 8}, "other prompts"),
        ({"compared_tokens": 65}, "other prompts"),
        (None, "cannot be read"),
    ],
)
def test_an_unfit_base_report_is_not_compared_with(open_session, tmp_path, change, words):
    path = tmp_path / "base.json"
    session = open_session({"base_reports": [str(path)]})
    if change is None:
        path.write_text("{")
    else:
        base_report(session, path, **change)
    result = RUN["acceptance_length"](session)
    assert result.status == "passed"
    assert words in result.detail
