"""Bad input over real connections: right status codes, and the server goes on (field case E10)."""

import concurrent.futures
import json
import socket
import time

import pytest

JSON = {"content-type": "application/json"}


def _alive(server):
    assert server.client.get("/health").status_code == 200
    assert len(server.generate("still here", sampling_params={"max_new_tokens": 2})["output_ids"]) == 2


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"text": "a"', 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"temperature": NaN}', 400, "NaN"),
        (b'{"nonsense": 1}', 400, "`nonsense` is not a known field"),
        (b" " * (4 << 20) + b"{}", 413, "longer than 4194304 bytes"),
    ],
)
def test_a_bad_body_is_refused_and_the_server_goes_on(server, path, body, status, said):
    response = server.client.post(path, content=body, headers=JSON)
    assert response.status_code == status
    error = response.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    _alive(server)


def test_a_chunked_body_without_a_length_is_limited_too(server):
    def parts():
        for _ in range(80):
            yield b" " * (1 << 16)

    response = server.client.post("/generate", content=parts(), headers=JSON)
    assert response.status_code == 413
    _alive(server)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": -1}, "`sampling_params.temperature`"),
        ({"max_new_tokens": 0}, "`sampling_params.max_new_tokens`"),
        ({"max_new_tokens": 10**9}, "`sampling_params.max_new_tokens`"),
        ({"json_schema": "{}"}, "`sampling_params.json_schema` is not supported"),
        ({"custom_params": {"ddtree": {"budget": 17}}}, "this server allows up to 16"),
    ],
)
def test_bad_sampling_parameters_are_named(server, sampling, said):
    response = server.client.post("/generate", json={"text": "a", "sampling_params": sampling})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    _alive(server)


def test_what_only_the_engine_refuses_is_said_before_a_stream_begins(server):
    body = {"prompt": "a", "custom_params": {"ddtree": {"expansion": "transition"}}}
    for stream in (False, True):
        response = server.client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 400
        assert "needs a transition table" in response.json()["error"]["message"]
    _alive(server)


def test_a_prompt_longer_than_the_context_is_refused_with_its_length(server):
    limit = server.client.get("/server_info").json()["context_length"]
    response = server.client.post("/v1/completions", json={"prompt": [1] * (limit + 5)})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(limit + 5) in error["message"]
    assert str(limit) in error["message"]


def test_an_unknown_model_is_404_and_the_served_and_default_names_are_not(server):
    for name, status in (("other", 404), ("tiny", 200), ("default", 200)):
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        response = server.client.post("/v1/completions", json=body)
        assert response.status_code == status
    assert server.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/generate", 405), ("DELETE", "/health", 405)],
)
def test_unknown_routes_answer_in_json(server, method, path, status):
    response = server.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_what_a_web_page_can_post_unasked_is_refused(server, content_type):
    headers = {"content-type": content_type} if content_type else {}
    response = server.client.post("/generate", content=b'{"text": "a"}', headers=headers)
    assert response.status_code == 415


def test_bytes_that_are_no_http_are_dropped(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10 + b"\r\n\r\n")
        assert b"400" in connection.recv(1000)
    _alive(server)


def test_a_client_that_leaves_while_it_sends_is_forgotten(server):
    host, port = server.url.removeprefix("http://").split(":")
    headers = ("Host: x", "Content-Type: application/json", "Content-Length: 99")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall("\r\n".join(["POST /generate HTTP/1.1", *headers, "", "{"]).encode())
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.2)  # the server has begun to read when the client goes
        _alive(server)
    assert "Traceback" not in server.log


def test_a_big_body_is_served_too(server):
    limit = server.client.get("/server_info").json()["context_length"]
    body = {"input_ids": [[1] * (limit - 4)] * 100, "sampling_params": {"max_new_tokens": 5}}
    assert (
        server.client.post("/generate", json=body).json()["error"]["param"]
        == "sampling_params.max_new_tokens"
    )
    text = server.client.post("/generate", json={"text": "a" * 200_000}).json()["error"]
    assert text["code"] == "context_length_exceeded"


def test_a_client_that_leaves_mid_stream_ends_its_request(server):
    aborted = server.metric("sglang:num_aborted_requests_total")
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    with server.client.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    server.wait_until(lambda: server.metric("sglang:num_aborted_requests_total") == aborted + 1)
    server.wait_until(lambda: server.metric("sglang:num_running_reqs") == 0)
    _alive(server)


def test_a_client_that_leaves_while_it_waits_ends_its_request(server):
    aborted = server.metric("sglang:num_aborted_requests_total")
    body = {"text": "a", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    data = json.dumps(body).encode()
    head = (
        "POST /generate HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        server.wait_until(lambda: server.metric("sglang:num_running_reqs") == 1)
    server.wait_until(lambda: server.metric("sglang:num_aborted_requests_total") == aborted + 1)
    server.wait_until(lambda: server.metric("sglang:num_running_reqs") == 0)
    _alive(server)


def test_64_clients_at_once_get_what_one_alone_gets(server):
    """Field case E13 too: the same prompt gives the same greedy text beside others."""
    prompts = [f"client {i}" for i in range(64)]
    alone = [server.generate(prompt)["output_ids"] for prompt in prompts[:8]]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda prompt: server.generate(prompt)["output_ids"], prompts))
    assert together[:8] == alone
    assert all(len(ids) == 16 for ids in together)


def test_a_request_id_in_use_is_refused(server):
    body = {"text": ["a", "b"], "rid": ["same", "same"]}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400
    assert "`same` is in use" in response.json()["error"]["message"]


def test_neither_prompts_nor_tokens_are_logged(server):
    server.generate("a very private prompt")
    server.client.post("/generate", content=b'{"a very private": prompt', headers=JSON)
    assert "private" not in server.log
    assert "private" not in server.debug_file.read_text()
