"""A server with much set: keys, a small queue, a chain, a chat template, a debug file on a full disk."""

import concurrent.futures
import json
import re

import httpx
import pytest

_USER, _ADMIN = 'pa$1wor$D {"a": "b c"}', "admin-\N{KEY}"
_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CHAIN = {"budget": 7, "topk_cap": 1, "expansion": "chain"}


@pytest.fixture(scope="module")
def configured(tiny_pair, pair_arguments, start_server, tmp_path_factory):
    root = tmp_path_factory.mktemp("configured")
    for path in tiny_pair.target.iterdir():
        (root / path.name).symlink_to(path)
    template = {"chat_template": _TEMPLATE, "eos_token": {"content": "<|eos|>"}}
    (root / "tokenizer_config.json").write_text(json.dumps(template))
    config = root / "server.yaml"
    config.touch(mode=0o600)
    config.write_text(
        json.dumps(
            {
                "api-key": _USER,
                "admin-api-key": _ADMIN,
                "max-running-requests": 1,
                "max_queued_requests": 1,
                "speculative-ddtree-budget": _CHAIN["budget"],
                "speculative-ddtree-topk-cap": _CHAIN["topk_cap"],
                "speculative-ddtree-expansion": _CHAIN["expansion"],
                "speculative-ddtree-debug-metrics": True,
                "speculative-ddtree-debug-file": "/dev/full",
            },
            ensure_ascii=False,
        )
    )
    with start_server("--model-path", str(root), *pair_arguments, "--config", str(config)) as server:
        server.client.headers["authorization"] = f"Bearer {_USER}"
        yield server
        assert server.process.poll() is None


def test_keys_open_what_they_should(configured):
    def status(path, key=None):
        headers = {"authorization": f"Bearer {key}".encode()} if key else {}
        return httpx.get(configured.url + path, headers=headers, timeout=60).status_code

    assert status("/health") == 200
    for path in ("/v1/models", "/server_info", "/metrics", "/health_generate"):
        assert [status(path), status(path, "wrong"), status(path, _USER)] == [401, 401, 200]
    for path in ("/flush_cache", "/ddtree/self_check"):
        assert [status(path), status(path, _USER), status(path, _ADMIN)] == [401, 401, 200]
    body = {"prompt": "a", "max_tokens": 1}
    refused = httpx.post(f"{configured.url}/v1/completions", json=body)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert configured.client.post("/v1/completions", json=body).status_code == 200


def test_keys_show_nowhere(configured):
    shown = (
        configured.client.get("/server_info").text + configured.client.get("/metrics").text + configured.log
    )
    assert not re.search("wor.D|admin-", shown)


def test_the_queue_is_bounded(configured):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}

    def post(_):
        return configured.client.post("/generate", json=body)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, range(8)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) >= 2
    assert set(codes) == {200, 503}
    full = next(answer for answer in answers if answer.status_code == 503)
    assert full.json()["error"]["code"] == "queue_full"
    assert full.headers["retry-after"] == "1"
    batch = {"text": ["a"] * 3, "sampling_params": body["sampling_params"]}
    refused = configured.client.post("/generate", json=batch)
    assert refused.status_code == 400
    assert "batch of 3" in refused.json()["error"]["message"]


def test_a_full_disk_under_the_debug_file_stops_nothing(configured):
    """Field case E11."""
    lost = configured.metric("ddtree:debug_lines_lost")
    info = configured.generate("disk full")["meta_info"]
    assert configured.metric("ddtree:debug_lines_lost") - lost == info["spec_verify_ct"]
    assert configured.log.count("No space left on device") == 1


def test_a_chain_by_flags_equals_a_chain_by_request(configured, server):
    """So the chain control of an acceptance test needs no restart."""
    for prompt in ("chain one", "chain two", "three"):
        left = configured.generate(prompt)
        right = server.generate(prompt, sampling_params={"custom_params": {"ddtree": _CHAIN}})
        assert left["output_ids"] == right["output_ids"]
        for key in ("spec_verify_ct", "spec_correct_drafts_histogram", "spec_num_proposed_drafts", "ddtree"):
            assert left["meta_info"][key] == right["meta_info"][key]


def test_the_checkpoints_own_chat_template_is_used(configured):
    assert configured.client.get("/server_info").json()["has_chat_template"] is True
    greedy = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    body = {"messages": [{"role": "user", "content": "hi"}], **greedy}
    answer = configured.client.post("/v1/chat/completions", json=body).json()
    plain = {"prompt": "<user>hi<|eos|><assistant>", **greedy}
    same = configured.client.post("/v1/completions", json=plain).json()
    for key in ("prompt_token_ids", "token_ids"):
        assert answer["choices"][0][key] == same["choices"][0][key]
    refused = configured.client.post(
        "/v1/chat/completions", json={**body, "messages": [{"role": "system", "content": "x"}]}
    )
    assert refused.status_code == 400
    assert "no system role" in refused.json()["error"]["message"]
