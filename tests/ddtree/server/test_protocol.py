import pytest

from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.protocol import parse_chat, parse_completion, parse_generate, parse_json
from toolkit.ddtree.server.requests import ModelLimits, completion_jobs, generate_jobs
from toolkit.ddtree.types import Expansion, TreeLimits

_MODEL = ModelLimits(
    context_length=64,
    vocab_size=100,
    tree=TreeLimits(16, 8),
    encode=lambda text: [ord(c) % 100 for c in text],
)


def _refusal(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1, "a": 2}', "same key twice"),
        (b"[1]", "must be a JSON object"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "\xed\xa0\x80"}', "not valid JSON"),  # the same half, written out
        ('{"text": "a"}'.encode("utf-16"), "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(data, said):
    assert said in _refusal(parse_json, data).message


def test_no_depth_is_too_much_for_one_part_alone():
    """Parsing and the look for surrogates end at different depths, a few apart."""
    said = set()
    for depth in range(600, 1001):
        try:
            parse_json(b'{"a": "\\u0061", "b": %b1%b}' % (b"[" * depth, b"]" * depth))
        except ApiError as error:
            said.add(error.message)
    assert said == {"The body is nested too deeply."}


@pytest.mark.parametrize(
    ("sampling", "param", "said"),
    [
        ({"temperature": 1e7}, "sampling_params.temperature", "less than or equal to 1000000"),
        ({"temperature": -0.1}, "sampling_params.temperature", "greater than or equal to 0"),
        ({"temperature": float("nan")}, "sampling_params.temperature", "finite"),
        ({"temperature": "hot"}, "sampling_params.temperature", "valid number"),
        ({"temperature": True}, "sampling_params.temperature", "valid number"),
        ({"top_p": 0}, "sampling_params.top_p", "greater than 0"),
        ({"max_new_tokens": 0}, "sampling_params.max_new_tokens", "greater than or equal to 1"),
        ({"max_new_tokens": 4.5}, "sampling_params.max_new_tokens", "valid integer"),
        ({"temprature": 1}, "sampling_params.temprature", "did you mean `temperature`?"),
        ({"regex": "a+"}, "sampling_params.regex", "not supported"),
        ({"json_schema": "{}"}, "sampling_params.json_schema", "not supported"),
        ({"n": 2}, "sampling_params.n", "not supported"),
        ({"n": True}, "sampling_params.n", "not supported"),
        ({"stop": [""]}, "sampling_params.stop.0", "at least 1 character"),
        ({"custom_params": {"other": 1}}, "sampling_params.custom_params.other", "not a known field"),
        (
            {"custom_params": {"ddtree": {"width": 1}}},
            "sampling_params.custom_params.ddtree.width",
            "not a known",
        ),
        (
            {"custom_params": {"ddtree": {"budget": 0}}},
            "sampling_params.custom_params.ddtree.budget",
            "equal to 1",
        ),
    ],
)
def test_sampling_params_are_refused_by_name(sampling, param, said):
    error = _refusal(parse_generate, {"text": "a", "sampling_params": sampling})
    assert said in error.message
    assert error.param == param
    assert f"`{param}`" in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "model": "x"}, "model"),
        ({"text": 3}, "text"),
        ({"input_ids": [1, -2]}, "input_ids.1"),
    ],
)
def test_generate_refuses_what_it_does_not_do(body, param):
    assert _refusal(parse_generate, body).param == param


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 3}, "n"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_chat_refuses_what_it_does_not_do(extra, param):
    body = {"messages": [{"role": "user", "content": "hi"}], **extra}
    assert _refusal(parse_chat, body).param == param


def test_escaped_text_is_accepted():
    assert parse_json(b'{"text": "\\ud83d\\ude00\\u00e9"}') == {
        "text": "\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}"
    }


def test_values_that_ask_for_nothing_are_accepted():
    parse_completion(
        {"prompt": "a", "n": 1, "logprobs": None, "echo": False, "response_format": {"type": "text"}}
    )
    parse_chat(
        {"messages": [{"role": "user", "content": "a"}], "tools": [], "modalities": ["text"], "user": "u"}
    )
    parse_generate({"text": "a", "return_logprob": False, "stream": None, "sampling_params": {"regex": None}})


def test_all_errors_come_at_once():
    message = _refusal(parse_completion, {"prompt": "a", "temperature": -1, "top_p": 2}).message
    assert "`temperature`" in message
    assert "`top_p`" in message


def _generate(**body):
    return generate_jobs(parse_generate(body), _MODEL)


def test_a_batch_spreads_single_values_and_keeps_lists():
    jobs, is_batch = _generate(
        input_ids=[[1], [2, 3]],
        sampling_params={
            "temperature": 0,
            "custom_params": {"ddtree": {"budget": 7, "topk_cap": 1, "expansion": "chain"}},
        },
        extra_key=["a", "b"],
        rid="x",
    )
    assert is_batch
    assert [job.request.input_ids for job in jobs] == [(1,), (2, 3)]
    assert [job.request.rid for job in jobs] == ["x_0", "x_1"]
    assert jobs[0].request.extra_key != jobs[1].request.extra_key
    assert {job.request.limits for job in jobs} == {TreeLimits(7, 1, Expansion.CHAIN)}


def test_a_list_of_one_is_a_batch_and_a_single_prompt_is_not():
    assert _generate(input_ids=[[1]])[1]
    assert not _generate(input_ids=[1])[1]
    assert not _generate(text="a")[1]


def test_left_out_tree_limits_are_the_servers():
    (job,), _ = _generate(text="a", sampling_params={"custom_params": {"ddtree": {"budget": 7}}})
    assert job.request.limits == TreeLimits(7, 8)
    (job,), _ = _generate(text="a")
    assert job.request.limits is None


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input_ids": [100]}, "input_ids", "not below 100"),
        ({"input_ids": []}, "input_ids", "empty"),
        ({"text": ""}, "text", "empty"),
        ({"text": []}, "text", "empty"),
        ({}, "text", "either `text` or `input_ids`"),
        ({"text": "a", "input_ids": [1]}, "text", "either"),
        ({"input_ids": [1] * 64}, "input_ids", "64 tokens"),
        (
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 64}},
            "sampling_params.max_new_tokens",
            "leave 63",
        ),
        (
            {"input_ids": [1], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}},
            None,
            "At least 9",
        ),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "sampling_params.top_k", "-1"),
        (
            {"input_ids": [1], "sampling_params": {"logit_bias": {"100": 1}}},
            "sampling_params.logit_bias",
            "'100'",
        ),
        (
            {"input_ids": [1], "sampling_params": {"logit_bias": {"\u0665": 1}}},
            "sampling_params.logit_bias",
            "no token id",
        ),
        (
            {"input_ids": [1], "sampling_params": {"stop_token_ids": [100]}},
            "sampling_params.stop_token_ids",
            "'100'",
        ),
        ({"input_ids": [[1], [2]], "extra_key": ["a"]}, "extra_key", "1 entries for 2 prompts"),
        (
            {"text": "a", "sampling_params": {"custom_params": {"ddtree": {"budget": 17}}}},
            "sampling_params.custom_params.ddtree.budget",
            "allows up to 16",
        ),
        (
            {"text": "a", "sampling_params": {"custom_params": {"ddtree": {"topk_cap": 9}}}},
            "sampling_params.custom_params.ddtree.topk_cap",
            "allows up to 8",
        ),
    ],
)
def test_limits_that_need_the_model(body, param, said):
    error = _refusal(lambda: _generate(**body))
    assert said in error.message
    assert param is None or error.param == param


def test_tree_limits_need_a_server_that_decodes_with_trees():
    model = ModelLimits(64, 100, None, _MODEL.encode)
    body = parse_generate({"text": "a", "sampling_params": {"custom_params": {"ddtree": {"budget": 7}}}})
    assert "does not decode with DDTREE" in _refusal(generate_jobs, body, model).message


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [(97, 98)]), (["a", "b"], [(97,), (98,)]), ([1, 2], [(1, 2)]), ([[1], [2]], [(1,), (2,)])],
)
def test_a_completion_prompt_is_text_or_tokens_one_or_many(prompt, expected):
    jobs = completion_jobs(parse_completion({"prompt": prompt}), _MODEL)
    assert [job.request.input_ids for job in jobs] == expected
    assert {job.request.sampling.max_new_tokens for job in jobs} == {16}


def test_default_limits_fit_the_context_and_small_temperatures_are_greedy():
    (job,), _ = _generate(input_ids=[1] * 60, sampling_params={"temperature": 1e-9})
    assert job.request.sampling.max_new_tokens == 4
    assert job.request.sampling.temperature == 0


def test_different_salts_never_meet():
    pairs = [(None, None), ("a", None), (None, "a"), ("a", "a"), (None, '["", "a"]')]
    keys = {
        _generate(text="a", extra_key=key, cache_salt=salt)[0][0].request.extra_key for key, salt in pairs
    }
    assert len(keys) == len(pairs)
