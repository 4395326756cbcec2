"""Penalties, least lengths and grammars through the tree, in SGLang's scheduler on a CPU, in float32.

Expected tokens come from one plain forward of the target a token, to which the formula, or xgrammar itself,
is applied.
"""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.sglang.conftest import BUNDLED, SLOW, environment
from toolkit.ddtree.models.config import read_target_config
from toolkit.ddtree.models.reference import target_forward

pytestmark = [pytest.mark.timeout(900), SLOW]

TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alpha", "beta", "gamma"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "done"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-z]{3,8}\((self|cls)(, [a-z]{2,4}){1,2}\):"


class Plain:
    """The target, without cache and without speculation."""

    def __init__(self):
        torch.set_num_threads(1)
        self.config = read_target_config(BUNDLED / "target")
        weights = load_file(BUNDLED / "target/model.safetensors")
        self.weights = {name: value.float() for name, value in weights.items()}

    def decode(self, prompt, tokens, frequency=0.0, presence=0.0, repetition=1.0, held=(), least=0, stop=()):
        output = []
        while len(output) < tokens and not (output and output[-1] in stop):
            with torch.inference_mode():
                all_logits, _ = target_forward(self.config, self.weights, [*prompt, *output])
            logits = all_logits[-1].clone()
            for token in set(output):
                value = float(logits[token]) - frequency * output.count(token) - presence
                logits[token] = value / repetition if value > 0 else value * repetition
            if len(output) < least:
                logits[list(held)] = -math.inf
            output.append(int(logits.argmax()))
        return output


@pytest.fixture(scope="module")
def plain():
    return Plain()


PENALTIES = [
    ({}, {}),
    (
        {"frequency_penalty": 1.0, "presence_penalty": 0.8},
        {"frequency": 1.0, "presence": 0.8},
    ),
    ({"repetition_penalty": 1.6}, {"repetition": 1.6}),
    (
        {"frequency_penalty": -0.5, "repetition_penalty": 1.3},
        {"frequency": -0.5, "repetition": 1.3},
    ),
]


@pytest.fixture(scope="module")
def penalised(server, prompts):
    return server.together([prompts[3]] * 4, TOKENS, [asked for asked, _ in PENALTIES])


@pytest.mark.parametrize("case", range(len(PENALTIES)))
def test_penalties_are_those_of_plain_decoding(penalised, plain, prompts, case):
    answer = penalised[case]
    assert answer["output_ids"] == plain.decode(prompts[3], TOKENS, **PENALTIES[case][1])
    assert answer["meta_info"]["spec_verify_ct"] < TOKENS - 4  # it did speculate


def test_penalties_change_the_text(penalised):
    assert len({tuple(answer["output_ids"]) for answer in penalised}) == len(PENALTIES)


def test_a_least_length_holds_back_stop_tokens_inside_a_path(server, plain, prompts):
    """The stop token is what plain decoding would give soonest after the third token."""
    free = plain.decode(prompts[1], TOKENS)
    stop = free[5]
    at = free.index(stop)
    asked = {"stop_token_ids": [stop], "ignore_eos": False}
    answer = server.generate(prompts[1], TOKENS, min_new_tokens=at + 4, **asked)
    held = {stop, 0}
    expected = plain.decode(prompts[1], TOKENS, held=held, least=at + 4, stop=held)
    assert answer["output_ids"] == expected
    assert len(answer["output_ids"]) >= at + 4
    assert server.generate(prompts[1], TOKENS, **asked)["output_ids"] == free[: at + 1]


@pytest.fixture(scope="module")
def reference(sglang_python: Path, prompts):
    cases = [
        {"prompt": prompts[0], "tokens": 48, "json_schema": json.dumps(SCHEMA)},
        {"prompt": prompts[2], "tokens": 48, "regex": REGEX},
    ]
    program = Path(__file__).with_name("grammar_reference.py")
    run = subprocess.run(
        [sglang_python, program],
        input=json.dumps({"decode": cases, "trees": list(range(24))}),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_masks_of_a_tree_are_those_of_each_path(reference):
    rows = [masked for _, masked in reference["trees"]]
    assert [wrong for wrong, _ in reference["trees"]] == [0] * 24
    assert sum(rows) > 12 * len(rows)
    assert min(rows) < 25  # some nodes are forbidden, or follow the grammar's end


def test_a_grammar_decodes_what_plain_constrained_decoding_does(server, reference, prompts):
    """Beside an unconstrained and a penalised request."""
    grammars = [{"json_schema": json.dumps(SCHEMA)}, {"frequency_penalty": 0.5}, {"regex": REGEX}, {}]
    asked = [own | {"ignore_eos": not ("regex" in own or "json_schema" in own)} for own in grammars]
    answers = server.together([prompts[0], prompts[1], prompts[2], prompts[3]], 48, asked)
    assert [answers[0]["output_ids"], answers[2]["output_ids"]] == reference["decode"]
    valid(answers[0]["text"])
    steps = [answers[place]["meta_info"]["spec_verify_ct"] for place in (0, 2)]
    tokens = [len(answers[place]["output_ids"]) for place in (0, 2)]
    assert sum(steps) < sum(tokens) - 6  # constrained requests speculate, too


def valid(text):
    told = json.loads(text)
    assert set(told) == {"name", "count", "done"}
    assert told["name"] in SCHEMA["properties"]["name"]["enum"]
    assert 0 <= told["count"] <= 99
    assert isinstance(told["done"], bool)


def test_sampled_text_is_valid(server, prompts):
    asked = {"json_schema": json.dumps(SCHEMA), "temperature": 1.5, "ignore_eos": False}
    more = [asked, asked | {"repetition_penalty": 1.3}]
    for answer in server.together(prompts[:2], 40, more):
        valid(answer["text"])


@pytest.mark.parametrize("schema", ['{"type": "nothing"', "{"])
def test_a_schema_that_is_none_is_answered_400(server, prompts, schema):
    answer = server.post(prompts[0], 4, json_schema=schema)
    assert answer.status_code == 400
    assert "grammar" in answer.text.lower()
    assert server.generate(prompts[0], 2)["meta_info"]["completion_tokens"] == 2
