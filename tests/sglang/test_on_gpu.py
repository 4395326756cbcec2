"""DDTREE in SGLang on a GPU: CUDA graphs, overlap scheduling and prefix cache, which a CPU cannot prove.

Needs an installed sglang and the plugin's entry point. Greedy tokens are judged by a float32 forward of the
target: in bfloat16 they may differ from its choice by near-ties only.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import time

import pytest
import torch

from benchmarks.sglang_engines import ROOT
from benchmarks.sglang_judge import Judge
from benchmarks.sglang_modes import read_prompts
from toolkit.ddtree.models.reference import target_forward
from toolkit.ddtree.sglang.options import ENVIRONMENT


def missing() -> str:
    """What these tests need and do not find."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed: pip install ddtoolkit[sglang]"
    names = [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]
    return "" if "ddtree" in names else "the plugin's entry point is not installed"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.filterwarnings("ignore"),
]

TOKENS, GRAPHS, DRAWS = 96, 8, 1500
CHECK = "self-check-of-this-test"
BEST_FIRST = {"expansion": "best_first"}
CHAIN = {"budget": 7, "topk_cap": 1, "expansion": "chain"}
LIMITS = [{}, CHAIN, {"budget": 9, "topk_cap": 3, "expansion": "best_first"}, {"expansion": "chain_seeded"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "count": {"type": "integer", "maximum": 999}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


class Files:
    """Where the bundled pair is, as the benchmark's arguments name it."""

    target = ROOT / "toolkit/ddtree/bundled/target"
    drafter = ROOT / "toolkit/ddtree/bundled/drafter"
    prompts = 24


@pytest.fixture(scope="module")
def debug_file(tmp_path_factory):
    return tmp_path_factory.mktemp("debug") / "debug.jsonl"


@pytest.fixture(scope="module")
def engine(debug_file):
    from sglang.srt.entrypoints.engine import Engine

    options = {"budget": 32, "topk_cap": 8, "expansion": "transition"}
    options |= {"debug_file": str(debug_file), "check_prefix": CHECK}
    os.environ[ENVIRONMENT] = json.dumps(options)
    started = Engine(
        model_path=str(Files.target),
        speculative_draft_model_path=str(Files.drafter),
        speculative_algorithm="DDTREE",
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="xgrammar",
        constrained_json_disable_any_whitespace=True,
        cuda_graph_backend_prefill="disabled",
        cuda_graph_max_bs_decode=GRAPHS,
        max_running_requests=32,
        max_total_tokens=65536,
        mem_fraction_static=0.6,
        context_length=2048,
        log_level="warning",
    )
    yield started
    started.shutdown()
    del os.environ[ENVIRONMENT]


@pytest.fixture(scope="module")
def judge():
    return Judge(Files.target)


@pytest.fixture(scope="module")
def prompts():
    return read_prompts(Files)


def greedy(engine, prompts, limits, tokens=TOKENS):
    sampling = [
        {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {"ddtree": own}}
        for own in limits
    ]
    return engine.generate(input_ids=prompts, sampling_params=sampling)


def outputs(answers):
    return [answer["output_ids"] for answer in answers]


def steps(answers):
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def test_a_batch_of_unequal_trees_is_lossless(engine, judge, prompts):
    answers = greedy(engine, prompts[:8], LIMITS * 2)
    verdict = judge.verdict(prompts, outputs(answers))
    assert verdict["positions"] == 8 * TOKENS
    assert verdict["lossless"], verdict


def test_chains_beside_trees_take_more_steps(engine, judge, prompts):
    trees = greedy(engine, prompts[:4], [BEST_FIRST] * 4)
    chains = greedy(engine, prompts[:4], [CHAIN] * 4)
    assert judge.verdict(prompts, outputs(chains))["lossless"]
    assert steps(trees) < 0.9 * steps(chains)


def test_more_requests_than_the_largest_graph(engine, judge, prompts):
    answers = greedy(engine, prompts, [{}] * len(prompts))
    verdict = judge.verdict(prompts, outputs(answers))
    assert verdict["positions"] > GRAPHS * TOKENS
    assert verdict["lossless"], verdict


def test_the_prefix_cache_holds_what_was_accepted(engine, judge, prompts):
    first = outputs(greedy(engine, prompts[8:12], [{}] * 4))
    longer = [prompt + output for prompt, output in zip(prompts[8:12], first, strict=True)]
    answers = greedy(engine, longer, [{}] * 4)
    for answer, prompt in zip(answers, longer, strict=True):
        assert answer["meta_info"]["cached_tokens"] >= len(prompt) - 2
    assert judge.verdict(longer, outputs(answers))["lossless"]


def test_one_wrong_token_fails_the_judge(engine, judge, prompts):
    output = outputs(greedy(engine, prompts[:1], [{}]))[0]
    output[TOKENS // 2] = (output[TOKENS // 2] + 1) % 2048
    assert not judge.verdict(prompts, [output])["lossless"]


def test_sampled_tokens_have_the_targets_distribution(engine, judge, prompts):
    """The second token is drawn in a verification: chi-square against the float32 target, given the first."""
    sampling = {"temperature": 1.0, "max_new_tokens": 2, "ignore_eos": True}
    answers = engine.generate(input_ids=[prompts[0]] * DRAWS, sampling_params=sampling)
    pairs = outputs(answers)
    first = max({pair[0] for pair in pairs}, key=lambda token: sum(pair[0] == token for pair in pairs))
    drawn = torch.tensor([pair[1] for pair in pairs if pair[0] == first])
    with torch.device(judge.device):
        logits, _ = target_forward(judge.config, judge.weights, [*prompts[0], first])
    expected = logits[-1].softmax(-1).cpu() * len(drawn)
    counts = torch.bincount(drawn, minlength=len(expected)).float()
    often = expected >= 8
    groups = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    chance = float(((seen - groups) ** 2 / groups).sum())
    freedom = len(groups) - 1
    assert len(drawn) > 200
    assert freedom >= 2
    assert chance < freedom + 4 * (2 * freedom) ** 0.5 + 8, (chance, freedom)


def adjusted(judge, prompt, output, change):
    """The float32 target's rows before each output token, after `change(row, tokens before it)`."""
    with torch.inference_mode(), torch.device(judge.device):
        logits, _ = target_forward(judge.config, judge.weights, [*prompt, *output])
    rows = logits[len(prompt) - 1 : -1].cpu().clone()
    for place, row in enumerate(rows):
        change(row, output[:place])
    return rows


def near(rows, output):
    """Whether greedy tokens are the rows' choices but for near-ties, as the judge has it."""
    best = rows.max(-1).values
    gaps = best - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
    deltas = torch.exp2(torch.floor(torch.log2(best.abs().clamp(min=1e-6))) - 5)
    return int((gaps > deltas).sum()) == 0 and int((gaps > 0).sum()) <= 0.05 * len(output)


def penalty(frequency=0.0, presence=0.0, repetition=1.0):
    def change(row, before):
        for token in set(before):
            value = float(row[token]) - frequency * before.count(token) - presence
            row[token] = value / repetition if value > 0 else value * repetition

    return change


def test_penalties_under_overlap(engine, judge, prompts):
    """Beside each other and beside requests without; judged along their own texts."""
    kinds = [
        ({}, {}),
        ({"frequency_penalty": 0.7, "presence_penalty": 0.5}, {"frequency": 0.7, "presence": 0.5}),
        ({"repetition_penalty": 1.5}, {"repetition": 1.5}),
        ({"frequency_penalty": -0.3, "repetition_penalty": 1.2}, {"frequency": -0.3, "repetition": 1.2}),
    ]
    base = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    taken = prompts[:12]
    sampling = [base | kinds[place % 4][0] for place in range(len(taken))]
    answers = outputs(engine.generate(input_ids=taken, sampling_params=sampling))
    for place, (prompt, output) in enumerate(zip(taken, answers, strict=True)):
        rows = adjusted(judge, prompt, output, penalty(**kinds[place % 4][1]))
        assert near(rows, output), (place, kinds[place % 4][0])
    plain = outputs(greedy(engine, taken, [{}] * len(taken)))
    changed = [place for place in range(len(taken)) if answers[place] != plain[place]]
    assert len(changed) >= 6
    for place in changed[:3]:  # the judge can fail: without the penalty these are no greedy texts
        assert not near(adjusted(judge, taken[place], answers[place], penalty()), answers[place])


def test_a_penalised_draw_has_its_distribution(engine, judge, prompts):
    """Chi-square of the second token, after the first was penalised."""
    sampling = {"temperature": 1.0, "max_new_tokens": 2, "ignore_eos": True, "frequency_penalty": 1.5}
    answers = engine.generate(
        input_ids=[prompts[0]] * DRAWS, sampling_params=sampling | {"presence_penalty": 0.5}
    )
    pairs = outputs(answers)
    first = max({pair[0] for pair in pairs}, key=lambda token: sum(pair[0] == token for pair in pairs))
    drawn = [pair[1] for pair in pairs if pair[0] == first]
    row = adjusted(judge, prompts[0], [first, 0], penalty(1.5, 0.5))[1]
    expected = row.softmax(-1) * len(drawn)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected)).float()
    often = expected >= 8
    groups = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    chance, freedom = float(((seen - groups) ** 2 / groups).sum()), len(groups) - 1
    assert len(drawn) > 200
    assert freedom >= 2
    assert chance < freedom + 4 * (2 * freedom) ** 0.5 + 8, (chance, freedom)


def test_a_least_length_holds_under_overlap(engine, judge, prompts):
    free = outputs(greedy(engine, prompts[:8], [{}] * 8))
    base = {"temperature": 0, "max_new_tokens": TOKENS}
    for least in (12, 30):
        sampling = [base | {"stop_token_ids": [text[6]], "min_new_tokens": least} for text in free]
        answers = engine.generate(input_ids=prompts[:8], sampling_params=sampling)
        for own, answer in zip(sampling, answers, strict=True):
            output, stop = answer["output_ids"], own["stop_token_ids"][0]
            assert len(output) >= least
            assert stop not in output[: least - 1]
            ends = {stop, 0}
            assert answer["meta_info"]["finish_reason"]["type"] == "length" or output[-1] in ends


def valid(text):
    told = json.loads(text)
    assert set(told) == {"name", "count"}
    assert told["name"] in ("alpha", "beta")
    assert told["count"] <= 999


def test_grammars_under_overlap(engine, prompts):
    """Greedy and drawn, penalised, beside free requests, more than the largest graph; all are valid."""
    schema = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 64}
    kinds = [
        schema | {"temperature": 0},
        schema | {"temperature": 1.5},
        {"temperature": 0, "max_new_tokens": 64},
        schema | {"temperature": 1.0, "repetition_penalty": 1.3},
        {"regex": "(yes|no|maybe){1,6}\\.", "temperature": 1.0, "max_new_tokens": 64},
    ]
    taken = [kinds[place % 5] for place in range(20)]
    answers = engine.generate(input_ids=prompts[:20], sampling_params=taken)
    counted = set()
    for own, answer in zip(taken, answers, strict=True):
        if "json_schema" in own and len(answer["output_ids"]) < 64:
            valid(answer["text"])
            counted.add(answer["text"])
        if "regex" in own:
            assert re.fullmatch("(yes|no|maybe){1,6}\\.", answer["text"])
    assert len(counted) >= 4
    constrained = [answer for own, answer in zip(taken, answers, strict=True) if "json_schema" in own]
    assert steps(constrained) < 0.9 * sum(len(x["output_ids"]) for x in constrained)


def test_transition_is_lossless_in_fewer_steps(engine, judge, prompts):
    rescored = greedy(engine, prompts[:16], [{}] * 16)
    marginal = greedy(engine, prompts[:16], [BEST_FIRST] * 16)
    assert judge.verdict(prompts, outputs(rescored))["lossless"]
    assert steps(rescored) < 0.97 * steps(marginal)


def test_debug_lines_are_one_a_step(engine, debug_file, prompts):
    time.sleep(1.0)
    before = len(debug_file.read_text().splitlines())
    answers = greedy(engine, prompts[:8], [{}] * 8)
    time.sleep(1.0)
    lines = [json.loads(line) for line in debug_file.read_text().splitlines()[before:]]
    # Under overlap one more step may be under way when a request ends.
    assert steps(answers) <= len(lines) <= steps(answers) + 16
    assert all(line["nodes"] == 32 and line["accepted"] == len(line["ranks"]) for line in lines)


def test_the_self_check_holds_in_bfloat16(engine, prompts):
    """Beside other requests, in a padded graph and beyond the largest one."""
    for others in (4, GRAPHS + 2):
        sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
        rids = [f"{CHECK}-{others}", *(f"other-{others}-{place}" for place in range(others))]
        engine.generate(input_ids=prompts[: others + 1], sampling_params=sampling, rid=rids)
        told = engine.get_server_info()["internal_states"][0]["ddtree"]["self_check"]
        assert told["rid"] == rids[0]
        assert all(check["ok"] for check in told["checks"]), told
        moved = next(check for check in told["checks"] if check["name"] == "accepted_kv")
        assert int(moved["detail"].split()[0]) > 0
