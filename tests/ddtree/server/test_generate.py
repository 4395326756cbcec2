"""`/generate`, the information endpoints, metrics and the debug file, on a real engine."""

import json

import pytest


def test_the_answer_has_sglangs_fields(server):
    prompt = [5, 6, 7, 8]
    answer = server.generate(prompt, rid="mine")
    assert set(answer) == {"text", "output_ids", "meta_info"}
    info = answer["meta_info"]
    assert info["id"] == "mine"
    assert info["prompt_tokens"] == 4
    assert info["completion_tokens"] == len(answer["output_ids"]) == 16
    assert info["finish_reason"] == {"type": "length", "length": 16}
    assert info["e2e_latency"] > 0
    assert info["ddtree"] == {"budget": 16, "topk_cap": 8, "expansion": "best_first"}


def test_the_speculation_counts_add_up(server):
    answer = server.generate("counts", sampling_params={"max_new_tokens": 40})
    info = answer["meta_info"]
    histogram = info["spec_correct_drafts_histogram"]
    assert sum(histogram) == info["spec_verify_ct"] > 0
    assert sum(i * n for i, n in enumerate(histogram)) == info["spec_num_correct_drafts"]
    assert info["spec_accept_length"] == pytest.approx(40 / info["spec_verify_ct"])
    # The first token is prefill's; a last step may have matched beyond the limit.
    assert 39 <= info["spec_verify_ct"] + info["spec_num_correct_drafts"] <= 39 + 7
    assert info["spec_num_proposed_drafts"] == 16 * info["spec_verify_ct"]


def test_a_batch_gives_a_list_in_order(server):
    prompts = [[1, 2], [3], [4, 5, 6]]
    answers = server.generate(prompts)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 1, 3]
    assert [answer["output_ids"] for answer in answers] == [server.generate(p)["output_ids"] for p in prompts]
    assert isinstance(server.generate([[1, 2]]), list)


def test_a_stream_ends_at_the_whole_answer(server):
    """As with SGLang, every event carries all text and tokens so far."""
    body = {"text": "stream", "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
    whole = server.client.post("/generate", json=body).json()
    events = server.stream("/generate", body)
    assert len(events) > 2
    assert all(events[-1]["text"].startswith(event["text"]) for event in events)
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_a_streamed_batch_says_which_answer_an_event_is_of(server):
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": [[1, 2], [3]], "sampling_params": sampling}
    whole = server.client.post("/generate", json=body).json()
    events = server.stream("/generate", body)
    for index in (0, 1):
        last = [event for event in events if event["index"] == index][-1]
        assert last["output_ids"] == whole[index]["output_ids"]


@pytest.mark.parametrize("seed", range(6))
def test_streamed_text_equals_whole_text_for_any_bytes(server, seed):
    """Sampled at temperature 2 from a random model, so most of it is no valid UTF-8."""
    sampling = {"temperature": 2.0, "max_new_tokens": 48, "ignore_eos": True, "sampling_seed": seed}
    body = {"text": f"seed {seed}", "sampling_params": sampling}
    whole = server.client.post("/generate", json=body).json()
    events = server.stream("/generate", body)
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]


def test_a_seed_fixes_the_text_and_another_changes_it(server):
    def sample(seed):
        sampling = {"temperature": 1.5, "max_new_tokens": 24, "sampling_seed": seed, "ignore_eos": True}
        return server.generate("seeded", sampling_params=sampling)["output_ids"]

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_a_stop_token_ends_it_and_shows_in_the_ids_alone(server):
    whole = server.generate("stop here", sampling_params={"max_new_tokens": 16})
    stop = whole["output_ids"][5]
    at = whole["output_ids"].index(stop)
    answer = server.generate("stop here", sampling_params={"max_new_tokens": 16, "stop_token_ids": [stop]})
    assert answer["output_ids"] == whole["output_ids"][: at + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = server.generate(
        "stop here", sampling_params={"max_new_tokens": 16, "stop_token_ids": [stop], "no_stop_trim": True}
    )
    assert kept["text"].startswith(answer["text"])
    assert len(kept["text"]) > len(answer["text"])


def test_a_stop_string_is_cut_in_whole_and_streamed_answers(server):
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    text = server.client.post("/generate", json={"text": "cut", "sampling_params": sampling}).json()["text"]
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    body = {"text": "cut", "sampling_params": {**sampling, "stop": ["\0never", stop]}}
    whole = server.client.post("/generate", json=body).json()
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert whole["text"] == text[: text.index(stop)]
    events = server.stream("/generate", body)
    assert events[-1]["text"] == whole["text"]
    assert all(stop not in event["text"] for event in events)


def test_salts_separate_the_prefix_cache_and_a_flush_empties_it(server):
    prompt = "a prompt that is long enough to be cached"
    server.client.post("/flush_cache")
    assert server.generate(prompt, extra_key="one")["meta_info"]["cached_tokens"] == 0
    assert server.generate(prompt, extra_key="one")["meta_info"]["cached_tokens"] > 0
    assert server.generate(prompt, extra_key="two")["meta_info"]["cached_tokens"] == 0
    assert server.generate(prompt, cache_salt="one")["meta_info"]["cached_tokens"] == 0
    assert server.metric("ddtree:prefix_cache_tokens") > 0
    assert server.client.get("/flush_cache").status_code == 200
    assert server.metric("ddtree:prefix_cache_tokens") == 0
    assert server.generate(prompt, extra_key="one")["meta_info"]["cached_tokens"] == 0


def test_health_generates_and_is_counted_nowhere(server):
    before = server.metric("sglang:generation_tokens_total")
    assert server.client.get("/health_generate").status_code == 200
    assert server.metric("sglang:generation_tokens_total") == before


def test_tokenize_gives_what_a_prompt_becomes(server):
    answer = server.client.post("/tokenize", json={"model": "tiny", "prompt": "def self"}).json()
    assert answer["count"] == len(answer["tokens"]) < len("def self")
    assert server.generate(answer["tokens"])["output_ids"] == server.generate("def self")["output_ids"]
    many = server.client.post("/tokenize", json={"prompt": ["def", "x"], "add_special_tokens": False}).json()
    assert many["count"] == [len(tokens) for tokens in many["tokens"]]
    assert server.client.post("/tokenize", json={"prompt": 3}).status_code == 400


def test_the_information_endpoints_agree_under_both_names(server):
    info = server.client.get("/server_info").json()
    for name, value in {
        "served_model_name": "tiny",
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": 16,
        "speculative_num_draft_tokens": 17,
        "speculative_dflash_block_size": 8,
        "cpu_threads": 1,
    }.items():
        assert info[name] == value
    assert server.client.get("/get_server_info").json().keys() == info.keys()
    assert server.client.get("/model_info").json() == server.client.get("/get_model_info").json()
    server.generate("some rounds")
    state = server.client.get("/server_info").json()["internal_states"][0]
    assert state["avg_spec_accept_length"] == pytest.approx(server.metric("sglang:spec_accept_length"))
    assert state["avg_spec_accept_length"] >= 1


def test_metrics_count_each_token_request_and_step_once(server):
    """Field case E14: by policy, at concurrency, streamed and not, aborted requests' tokens included."""
    names = (
        "sglang:num_requests_total",
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:spec_verify_calls_total",
        "sglang:time_to_first_token_seconds_count",
        "sglang:e2e_request_latency_seconds_count",
        "ddtree:verify_steps_by_accepted_total",
    )

    def read(**labels):
        return [server.metric(name, **labels) for name in names]

    def expected(answers):
        infos = [answer["meta_info"] for answer in answers]
        steps = sum(info["spec_verify_ct"] for info in infos)
        tokens = sum(info["completion_tokens"] for info in infos)
        return [
            len(infos),
            sum(info["prompt_tokens"] for info in infos),
            tokens,
            steps,
            len(infos),
            len(infos),
            steps,
        ]

    def delta(after, before):
        return [a - b for a, b in zip(after, before, strict=True)]

    total, chain, wide = read(), read(expansion="chain"), read(expansion="best_first")
    inter_token = server.metric("sglang:inter_token_latency_seconds_count")
    limits = {"budget": 7, "topk_cap": 1, "expansion": "chain"}
    chained = server.generate(
        [[i] for i in range(1, 6)], sampling_params={"custom_params": {"ddtree": limits}}
    )
    others = server.generate([[i, i] for i in range(1, 9)])
    sampling = {"max_new_tokens": 10, "ignore_eos": True}
    others.append(server.stream("/generate", {"text": "streamed", "sampling_params": sampling})[-1])
    assert delta(read(expansion="chain"), chain) == expected(chained)
    assert delta(read(expansion="best_first"), wide) == expected(others)
    assert delta(read(), total) == expected(chained + others)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in chained + others)
    later = tokens - len(chained + others)
    assert server.metric("sglang:inter_token_latency_seconds_count") - inter_token == later
    assert server.metric("sglang:generation_tokens_total", mode="DDTREE") == server.metric(
        "sglang:generation_tokens_total"
    )


def test_a_policy_that_needs_a_table_is_refused_where_there_is_none(server):
    custom = {"ddtree": {"expansion": "transition"}}
    body = {"input_ids": [1], "sampling_params": {"custom_params": custom}}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400
    assert "config.json lacks transition_config" in response.text


def test_a_server_with_a_table_decodes_with_it(start_server):
    bundled = ["--model-path", "bundled", "--speculative-draft-model-path", "bundled", "--cpu-threads", "1"]
    tree = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-expansion", "transition"]
    with start_server(*bundled, *tree, "--speculative-ddtree-budget", "12") as running:
        assert running.client.get("/server_info").json()["speculative_ddtree_expansion"] == "transition"
        prompt = "class Point:\n    def __init__(self, x, y):\n"
        steps = {}
        for policy in ("transition", "best_first", "chain"):
            limits = {"ddtree": {"expansion": policy}}
            sampling = {"max_new_tokens": 64, "custom_params": limits}
            answer = running.generate(prompt, sampling_params=sampling)
            steps[policy] = answer["meta_info"]["spec_verify_ct"], answer["text"]
        assert len({text for _, text in steps.values()}) == 1
        assert steps["transition"][0] < steps["chain"][0]


def test_the_debug_file_has_one_line_a_verify_step(server):
    lines = len(server.debug_file.read_text().splitlines())
    info = server.generate("debug", sampling_params={"max_new_tokens": 20})["meta_info"]
    new = [json.loads(line) for line in server.debug_file.read_text().splitlines()[lines:]]
    assert len(new) == info["spec_verify_ct"]
    keys = {"nodes", "depth", "accepted", "committed", "chain_in_tree", "ranks", "reject_rank"}
    assert all(set(line) == keys for line in new)
    assert sum(line["accepted"] for line in new) == info["spec_num_correct_drafts"]
    assert server.debug_file.stat().st_mode & 0o777 == 0o640


def test_the_self_check_passes_on_a_sound_server(server):
    answer = server.client.get("/ddtree/self_check").json()
    assert answer["ok"], [check for check in answer["checks"] if not check["ok"]]
    assert len(answer["checks"]) > 2
