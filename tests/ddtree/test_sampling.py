"""The target's choices: exact distributions, penalties along a path, stop strings, noise."""

import math

import numpy as np
import pytest
import torch

from tests.ddtree.conftest import build_engine, generate, request
from toolkit.ddtree.models.config import read_target_config
from toolkit.ddtree.models.loading import load_target_weights
from toolkit.ddtree.models.reference import target_forward
from toolkit.ddtree.sampling import Sampler, argmax, gumbel_noise
from toolkit.ddtree.stopping import StopStrings
from toolkit.ddtree.types import Algorithm, SamplingParams, TreeLimits

CPU = torch.device("cpu")
ROOT_ONLY = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1, 1) > 0)


def exceeds(observed, expected):
    """Chi-square statistic against its mean plus four standard deviations."""
    assert expected.min() >= 5, "too few samples for the test"
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return statistic > freedom + 4 * math.sqrt(2 * freedom)


def merged(observed, expected, least=6):
    """Put the cells that are expected too rarely into one."""
    rare = expected < least
    if not rare.any():
        return observed, expected
    return np.append(observed[~rare], observed[rare].sum()), np.append(expected[~rare], expected[rare].sum())


@pytest.mark.parametrize("algorithm", [Algorithm.NONE, Algorithm.DFLASH, Algorithm.DDTREE])
def test_sampled_pairs_follow_the_targets_distribution(lucky_pair, algorithm):
    """Joint counts of the second and third output token: a tree decides how both are reached."""
    prompt, temperature, draws = [1, 2, 3], 3.0, 1400
    config = read_target_config(lucky_pair.target)
    weights = load_target_weights(lucky_pair.target, config, torch.float32, CPU)

    def probabilities(tokens):
        return (
            torch.softmax(target_forward(config, weights, tokens)[0][-1] / temperature, -1).double().numpy()
        )

    first = int(probabilities(prompt).argmax())
    second = probabilities([*prompt, first])
    joint = np.stack([second[t] * probabilities([*prompt, first, t]) for t in range(16)])
    engine = build_engine(lucky_pair, algorithm, limits=TreeLimits(16, 8))
    results = generate(
        engine,
        *(
            request(
                str(seed), [*prompt, first], temperature=temperature, sampling_seed=seed, max_new_tokens=2
            )
            for seed in range(draws)
        ),
    )
    observed = np.zeros((16, 16))
    for result in results.values():
        observed[tuple(result.tokens)] += 1
    counts, expected = merged(observed.ravel(), joint.ravel() * draws)
    assert len(expected) > 20
    assert not exceeds(counts, expected)
    colder = joint**1.3 / (joint**1.3).sum()
    assert exceeds(*merged(observed.ravel(), colder.ravel() * draws)), (
        "the test cannot tell distributions apart"
    )


def test_gumbel_noise_is_standard_and_a_function_of_seed_and_position():
    noise = torch.cat([gumbel_noise(seed, 5, 2048) for seed in range(50)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert torch.equal(gumbel_noise(1, 2, 64), gumbel_noise(1, 2, 64))
    for seed, position in [(1, 3), (2, 2), (-1, 2), (1 + 2**33, 2)]:
        assert not torch.equal(gumbel_noise(1, 2, 64), gumbel_noise(seed, position, 64))
    assert torch.equal(gumbel_noise(1, 2, 64)[:16], gumbel_noise(1, 2, 16))


def sampler(prompt=(0,), stop_ids=frozenset(), vocabulary=6, seed=0, **params):
    return Sampler(SamplingParams(**{"temperature": 0.0, **params}), seed, stop_ids, prompt, vocabulary, CPU)


def test_penalties_count_prompt_output_and_the_nodes_own_path():
    """A tree root -> 4 -> 5, and root -> 2 beside it."""
    tokens = torch.tensor([3, 4, 5, 2])
    depths = torch.tensor([0, 1, 2, 1])
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]) > 0
    chooser = sampler(prompt=(1,), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    chooser.commit([3, 3])
    logits = torch.tensor([4.0, 4.0, -4.0, 4.0, 4.0, -4.0]).repeat(4, 1)
    adjusted = chooser._adjusted(logits, tokens, depths, ancestors)
    once, twice = 0.5 + 0.25, 2 * 0.5 + 0.25
    expected = torch.tensor(
        [
            [4.0, 2.0, -4.0, 2.0 - twice, 4.0, -4.0],  # 1 in the prompt, 3 twice in the output
            [4.0, 2.0, -4.0, 2.0 - twice, 2.0 - once, -4.0],  # and 4 on the path
            [4.0, 2.0, -4.0, 2.0 - twice, 2.0 - once, -8.0 - once],  # and 5
            [4.0, 2.0, -8.0 - once, 2.0 - twice, 4.0, -4.0],  # its own path only: 2
        ]
    )
    assert torch.allclose(adjusted, expected)


def test_stop_tokens_are_held_back_by_depth():
    chooser = sampler(stop_ids=frozenset({2}), min_new_tokens=3)
    assert not chooser.is_argmax
    chooser.commit([1])
    depths = torch.tensor([0, 1, 2])
    logits = torch.tensor([0.0, 0.0, 9.0, 0.0, 1.0, 0.0]).repeat(3, 1)
    chosen = chooser.choose(logits, torch.tensor([1, 1, 1]), depths, torch.ones(3, 3).tril() > 0, position=7)
    assert chosen.tolist() == [4, 4, 2]  # outputs 2 and 3 may not be the stop token, output 4 may
    chooser.commit([1, 1])
    assert chooser.is_argmax


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.55}, {0, 1}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 0.3, "top_k": 3}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.5, "temperature": 2.0}, {0, 1}),  # judged after the temperature: 0.36, 0.22, ...
    ],
)
def test_filters_keep_what_they_should(params, kept):
    probabilities = torch.tensor([[0.54, 0.2, 0.14, 0.1, 0.02]])
    seen = {
        int(
            sampler(seed=seed, vocabulary=5, **{"temperature": 1.0, **params}).choose(
                probabilities.log(), *ROOT_ONLY, position=3
            )
        )
        for seed in range(200)
    }
    assert seen == kept


def test_equal_logits_go_by_token_id():
    assert argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]
    narrow = torch.tensor([[1.0, 3.0, 3.0]], dtype=torch.bfloat16)
    assert argmax(narrow).tolist() == [1]
    kept = {
        int(
            sampler(temperature=1.0, seed=s, vocabulary=3, top_k=1).choose(
                torch.zeros(1, 3), *ROOT_ONLY, position=3
            )
        )
        for s in range(20)
    }
    assert kept == {0}


PIECES = {1: b"ab", 2: b"c", 3: b"\xe2\x82", 4: b"\xac", 5: b"abc"}


def decode(tokens):
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("stop", "tokens", "at", "found"),
    [
        (["bc"], [1, 2], 1, "bc"),
        (["abab"], [2, 1, 1, 2], 2, "abab"),
        (["bcab"], [1, 2, 5], 2, "bcab"),
        (["€"], [1, 3, 4, 1], 2, "€"),
        (["b€a"], [1, 3, 4, 5], 3, "b€a"),
        (["c", "ab"], [5], 0, "ab"),
        (["bc", "abc"], [5], 0, "abc"),
        (["a", "ab"], [1], 0, "ab"),
        (["zz"], [1, 2, 5, 3, 4], None, None),
    ],
)
def test_stop_strings_are_found_at_the_token_that_completes_them(stop, tokens, at, found):
    watcher = StopStrings(stop, decode)
    results = [watcher.push(token) for token in tokens]
    expected = [None] * len(tokens)
    if at is not None:
        expected[at] = found
        results, expected = results[: at + 1], expected[: at + 1]
    assert results == expected
