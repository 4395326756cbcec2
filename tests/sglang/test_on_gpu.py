"""DDTREE in SGLang on a GPU: CUDA graphs, overlap scheduling and prefix cache, which a CPU cannot prove.

Needs an installed sglang and the plugin's entry point. Greedy tokens are judged by a float32 forward of the
target: in bfloat16 they may differ from its choice by near-ties only.
"""

import importlib.metadata
import importlib.util
import json
import os

import pytest
import torch

from benchmarks.sglang_modes import ROOT, Judge, read_prompts
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
CHAIN = {"budget": 7, "topk_cap": 1, "expansion": "chain"}
LIMITS = [{}, CHAIN, {"budget": 9, "topk_cap": 3}, {"expansion": "chain_seeded"}]


class Files:
    """Where the bundled pair is, as the benchmark's arguments name it."""

    target = ROOT / "toolkit/ddtree/bundled/target"
    drafter = ROOT / "toolkit/ddtree/bundled/drafter"
    prompts = 24


@pytest.fixture(scope="module")
def engine():
    from sglang.srt.entrypoints.engine import Engine

    os.environ[ENVIRONMENT] = json.dumps({"budget": 32, "topk_cap": 8})
    started = Engine(
        model_path=str(Files.target),
        speculative_draft_model_path=str(Files.drafter),
        speculative_algorithm="DDTREE",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
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
    return Judge(Files)


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
    trees = greedy(engine, prompts[:4], [{}] * 4)
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
    logits, _ = target_forward(judge.config, judge.weights, [*prompts[0], first])
    expected = logits[-1].softmax(-1) * len(drawn)
    counts = torch.bincount(drawn, minlength=len(expected)).float()
    often = expected >= 8
    groups = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    chance = float(((seen - groups) ** 2 / groups).sum())
    freedom = len(groups) - 1
    assert len(drawn) > 200
    assert freedom >= 2
    assert chance < freedom + 4 * (2 * freedom) ** 0.5 + 8, (chance, freedom)
