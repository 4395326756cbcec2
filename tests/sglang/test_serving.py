"""DDTREE in SGLang's real scheduler and HTTP server on a CPU, in float32: its tokens are plain decoding's.

Plain decoding and linear DFLASH are the embedded engine's, with the same checkpoints; tokens are also asked
of the server itself as a prefill, which never speculates.
"""

from dataclasses import dataclass

import pytest

from tests.sglang.conftest import BUNDLED, CONTEXT
from toolkit.ddtree.engine import Engine
from toolkit.ddtree.types import Algorithm, EngineConfig, Request, SamplingParams, TreeLimits

pytestmark = pytest.mark.timeout(900)

TOKENS = 20
TREE = TreeLimits(16, 8)
CHAIN = {"custom_params": {"ddtree": {"budget": 7, "topk_cap": 1, "expansion": "chain"}}}
NARROW = {"custom_params": {"ddtree": {"budget": 9, "topk_cap": 3}}}
SEEDED = {"custom_params": {"ddtree": {"expansion": "chain_seeded"}}}


@dataclass
class Reference:
    """What the embedded engine decodes, one request after the other."""

    algorithm: Algorithm
    limits: TreeLimits = TREE

    def __post_init__(self):
        self.engine = Engine(
            EngineConfig(BUNDLED / "target", BUNDLED / "drafter", self.algorithm, self.limits, threads=1)
            if self.algorithm is not Algorithm.NONE
            else EngineConfig(BUNDLED / "target", algorithm=Algorithm.NONE, threads=1)
        )

    def decode(self, prompt, tokens, **sampling):
        """The tokens, and the verify steps they took."""
        params = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True, **sampling)
        self.engine.add(Request("one", tuple(prompt), params))
        output, steps = [], 0
        while self.engine.has_work:
            for piece in self.engine.step():
                output += piece.token_ids
                steps += piece.round is not None
        return output, steps


@pytest.fixture(scope="module")
def plain():
    return Reference(Algorithm.NONE)


@pytest.fixture(scope="module")
def expected(plain, prompts):
    return [plain.decode(prompt, TOKENS)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def tree(server, prompts):
    return server.together(prompts, TOKENS, [{}] * len(prompts))


def outputs(answers):
    return [answer["output_ids"] for answer in answers]


def steps(answers):
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


def test_trees_decode_what_plain_decoding_does(tree, expected):
    assert outputs(tree) == expected


def test_trees_take_the_steps_of_the_embedded_engine(tree, prompts):
    embedded = Reference(Algorithm.DDTREE)
    assert steps(tree) == [embedded.decode(prompt, TOKENS)[1] for prompt in prompts]


def test_a_request_limited_to_the_chain_takes_dflash_steps(server, prompts, expected, tree):
    linear = Reference(Algorithm.DFLASH)
    limited = server.together(prompts, TOKENS, [CHAIN] * len(prompts))
    assert outputs(limited) == expected
    assert steps(limited) == [linear.decode(prompt, TOKENS)[1] for prompt in prompts]
    assert sum(steps(tree)) < sum(steps(limited))


def test_a_batch_of_unequal_trees_decodes_the_same(server, prompts, expected, tree):
    answers = server.together(prompts, TOKENS, [{}, CHAIN, NARROW, SEEDED])
    assert outputs(answers) == expected
    assert steps(answers)[0] == steps(tree)[0]


def test_without_moving_rows_the_text_is_corrupt(server, prompts, expected, leave_moves_out):
    """The comparison must be able to fail: here no K/V row follows its token."""
    leave_moves_out.touch()
    try:
        answers = server.together(prompts, TOKENS, [{}] * len(prompts))
    finally:
        leave_moves_out.unlink()
        assert server.client.post(f"{server.url}/flush_cache").status_code == 200
    assert outputs(answers) != expected


def test_every_token_is_what_a_prefill_gives(server, prompts, tree):
    prompt, output = prompts[0], tree[0]["output_ids"]
    probes = [server.generate(prompt + output[:length], 1)["output_ids"][0] for length in range(1, 8)]
    assert probes == output[1:8]


def test_the_prefix_cache_holds_what_was_accepted(server, plain, prompts, expected):
    server.generate(prompts[1], TOKENS)
    longer = prompts[1] + expected[1]
    answer = server.generate(longer, 8)
    assert answer["meta_info"]["cached_tokens"] >= len(longer) - 2
    assert answer["output_ids"] == plain.decode(longer, 8)[0]


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_the_token_limit_holds_inside_an_accepted_path(server, prompts, expected, tokens):
    answer = server.generate(prompts[0], tokens)
    assert answer["output_ids"] == expected[0][:tokens]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": tokens}


def test_a_stop_token_inside_an_accepted_path_ends_there(server, prompts, expected):
    stop = expected[0][6]
    at = expected[0].index(stop)
    answer = server.generate(prompts[0], TOKENS, stop_token_ids=[stop], ignore_eos=False)
    assert answer["output_ids"] == expected[0][: at + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_request_at_the_context_limit_leaves_its_neighbours_alone(server, plain, prompts):
    """Its last verifications reserve more rows than the context has left."""
    text = prompts[0] + plain.decode(prompts[0], 400)[0] + prompts[1] + prompts[2]
    full = text[: CONTEXT - 22]
    own = [{"max_new_tokens": CONTEXT - len(full)}, {}, {}, {}]
    answers = server.together([full, *prompts[:3]], 40, own)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"
    room = len(answers[0]["output_ids"])
    assert CONTEXT - 4 <= len(full) + room < CONTEXT
    assert answers[0]["output_ids"] == plain.decode(full, room)[0]
    assert outputs(answers[1:]) == [plain.decode(prompt, 40)[0] for prompt in prompts[:3]]


def test_a_prompt_of_one_token(server, plain, prompts):
    assert server.generate(prompts[0][:1], 8)["output_ids"] == plain.decode(prompts[0][:1], 8)[0]


def test_a_logit_bias_holds_at_every_node(server, plain, prompts, expected):
    banned = expected[0][2]
    answer = server.generate(prompts[0], 8, logit_bias={str(banned): -100.0})
    assert answer["output_ids"] == plain.decode(prompts[0], 8, logit_bias={banned: -100.0})[0]
    assert banned not in answer["output_ids"]


def test_sampling_with_one_choice_left_is_greedy(server, prompts, expected):
    answer = server.generate(prompts[0], 8, temperature=1.0, top_p=1e-6)
    assert answer["output_ids"] == expected[0][:8]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"custom_params": {"ddtree": {"budget": 17}}}, "budget is 17; give an integer from 1 to 16"),
        ({"custom_params": {"ddtree": {"width": 3}}}, "custom_params.ddtree.width is not known"),
        ({"custom_params": {"ddtree": {"expansion": "widest"}}}, "expansion is 'widest'"),
        ({"custom_params": {"ddtree": {"expansion": "transition"}}}, "started without"),
    ],
)
def test_what_cannot_be_done_exactly_is_answered_400(server, prompts, sampling, named):
    answer = server.post(prompts[0], 4, **sampling)
    assert answer.status_code == 400
    assert named in answer.text


def test_logprobs_are_answered_400_and_serving_goes_on(server, prompts, expected):
    body = {"input_ids": prompts[0], "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    answer = server.client.post(f"{server.url}/generate", json=body)
    assert answer.status_code == 400
    assert server.generate(prompts[0], 2)["output_ids"] == expected[0][:2]
