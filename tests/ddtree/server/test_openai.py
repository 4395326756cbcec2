"""The OpenAI endpoints' objects, whole and streamed, field by field as the `openai` package reads them."""

import pytest

_GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def test_a_completion(server):
    body = {"model": "tiny", "prompt": "def f", **_GREEDY}
    answer = server.client.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice["text"] == server.generate("def f", sampling_params={"max_new_tokens": 12})["text"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_completion_of_many_prompts(server):
    body = {"prompt": [[1, 2], [3]], "return_token_ids": True, **_GREEDY}
    answer = server.client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2], [3]]
    assert all(len(choice["token_ids"]) == 12 for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_completion_concatenates_to_the_whole(server, include_usage):
    body = {"prompt": ["one", "two"], "return_token_ids": True, **_GREEDY}
    whole = server.client.post("/v1/completions", json=body).json()
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    events = server.stream("/v1/completions", {**body, **options})
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    if include_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)
    for index, choice in enumerate(whole["choices"]):
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_a_chat_completion(server):
    body = {"messages": [{"role": "user", "content": "hi"}], **_GREEDY}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], **_GREEDY}
    same = server.client.post("/v1/chat/completions", json=parts).json()
    assert same["choices"][0]["message"] == choice["message"]
    events = server.stream("/v1/chat/completions", body)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chat_without_a_limit_runs_to_the_end_of_the_context(server):
    body = {"messages": [{"role": "user", "content": "x" * 450}], "temperature": 0, "ignore_eos": True}
    usage = server.client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == server.client.get("/server_info").json()["context_length"]


def test_usage_can_come_with_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream("/v1/completions", {"prompt": "a", "stream_options": options, **_GREEDY})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_stream_options_without_stream_are_refused(server):
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_a_seed_and_the_tree_limits_work_here_too(server):
    body = {"prompt": "a", "seed": 3, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    first = server.client.post("/v1/completions", json=body).json()["choices"]
    limits = {"custom_params": {"ddtree": {"budget": 7, "topk_cap": 1, "expansion": "chain"}}}
    assert server.client.post("/v1/completions", json={**body, **limits}).json()["choices"] == first
    assert server.client.post("/v1/completions", json={**body, "seed": 4}).json()["choices"] != first
    too_wide = {"custom_params": {"ddtree": {"budget": 99}}}
    assert server.client.post("/v1/completions", json={**body, **too_wide}).status_code == 400


def test_the_models(server):
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    (model,) = models["data"]
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["max_model_len"] == server.client.get("/server_info").json()["context_length"]
    assert server.client.get("/v1/models/tiny").json() == model
