"""Starting, stopping, and faults while serving."""

import concurrent.futures
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from toolkit.ddtree.server import __main__ as main_module
from toolkit.ddtree.server.__main__ import StartError, bind, listen, main
from toolkit.ddtree.server.chat import ChatTemplate

# Breaks the engine where a request's cache salt asks for it.
_FAULTS = """
from toolkit.ddtree.engine import Engine
add, round_, step = Engine.add, Engine._round, Engine.step

def asked(requests, fault):
    return any(fault in item.request.extra_key for item in requests)

def faulty_add(self, request):
    if "fail-add" in request.extra_key:
        raise RuntimeError("injected")
    add(self, request)

def faulty_round(self):
    if asked(self._running, "fail-round"):
        raise RuntimeError("injected")
    return round_(self)

def faulty_step(self):
    if asked(self._running, "fail-step"):
        raise RuntimeError("injected")
    if asked(self._running, "die"):
        raise SystemExit("injected")
    return step(self)

Engine.add, Engine._round, Engine.step = faulty_add, faulty_round, faulty_step
"""
_LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}


def test_a_fault_fails_its_requests_and_a_dead_engine_ends_the_process(start_server, tree_arguments):
    with start_server(*tree_arguments, sabotage=_FAULTS) as server:
        for fault in ("fail-add", "fail-round", "fail-step"):
            body = {"text": "a", "extra_key": fault, "sampling_params": _LONG}
            response = server.client.post("/generate", json=body)
            assert response.status_code == 500, fault
            assert "see the server's log" in response.json()["error"]["message"]
            events = server.stream("/generate", body)
            assert events[-1]["error"]["type"] == "server_error"
            assert server.client.get("/health").status_code == 200
            assert len(server.generate("fine")["output_ids"]) == 16
        assert server.log.count("RuntimeError: injected") == 6
        assert server.metric("sglang:num_aborted_requests_total") == 6
        assert server.metric("sglang:num_running_reqs") == 0
        with httpx.Client(base_url=server.url) as other:
            other.get("/health")  # a connection from before the death
            body = {"text": "a", "extra_key": "die", "sampling_params": _LONG}
            response = server.client.post("/generate", json=body)
            assert response.status_code == 500
            assert other.get("/health").status_code == 503
            assert other.post("/generate", json={"text": "a"}).status_code == 503
        assert server.process.wait(15) == 1


@pytest.mark.parametrize("seconds", ["60", "0.05"])
def test_sigterm_lets_requests_in_flight_end(start_server, tree_arguments, seconds):
    """Field case E12: they run to their end if that is soon enough, else they end cleanly at the limit."""
    with (
        start_server(*tree_arguments, "--shutdown-timeout", seconds) as server,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        body = {"prompt": "a", "temperature": 0, "max_tokens": 500, "ignore_eos": True}
        whole = pool.submit(server.client.post, "/v1/completions", json=body)
        streamed = pool.submit(server.stream, "/v1/completions", body)
        server.wait_until(lambda: server.metric("sglang:num_running_reqs") == 2)
        host, port = server.url.removeprefix("http://").split(":")
        half = socket.create_connection((host, int(port)), timeout=10)
        half.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        half.sendall(b"Content-Length: 99\r\n\r\n{")
        started = time.monotonic()
        server.process.terminate()
        last = streamed.result(60)[-1]["choices"][0]
        response = whole.result(60)
        if seconds == "60":
            half.close()  # it would be waited for
        assert server.process.wait(30) == 0
        half.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=1)
        if seconds == "60":
            assert response.json()["usage"]["completion_tokens"] == 500
            assert last["finish_reason"] == "length"
            assert "Traceback" not in server.log
        else:
            assert response.status_code == 503
            assert last["finish_reason"] == "abort"
            assert time.monotonic() - started < 10
            # The half-sent request; the log is read by a thread of its own, so its last lines may be late.
            server.wait_until(lambda: "running task(s)" in server.log)


@pytest.mark.parametrize("algorithm", ["NONE", "DFLASH"])
def test_the_other_modes_serve_and_count_under_their_own_label(tiny_pair, start_server, server, algorithm):
    flags = ["--model-path", str(tiny_pair.target), "--speculative-algorithm", algorithm]
    if algorithm == "DFLASH":
        flags += ["--speculative-draft-model-path", str(tiny_pair.drafter)]
    with start_server(*flags) as other:
        answer = other.generate("the same text in every mode")
        assert answer["output_ids"] == server.generate("the same text in every mode")["output_ids"]
        assert ("spec_verify_ct" in answer["meta_info"]) == (algorithm == "DFLASH")
        assert "ddtree" not in answer["meta_info"]
        assert other.metric("sglang:generation_tokens_total", mode=algorithm) == 16
        assert other.metric("sglang:generation_tokens_total") == 16
        steps = answer["meta_info"].get("spec_verify_ct", 0)
        assert other.metric("sglang:spec_verify_calls_total", mode=algorithm) == steps
        body = {"text": "a", "sampling_params": {"custom_params": {"ddtree": {"budget": 1}}}}
        assert "does not decode with DDTREE" in other.client.post("/generate", json=body).text
        assert other.client.get("/server_info").json()["speculative_algorithm"] == algorithm


_HASTY = """
from toolkit.ddtree.server import app, connections
app._BODY_SECONDS = connections.HEAD_SECONDS = 1.0
"""


def _drip(connection):
    """Send a header now and then, until the server has closed the connection."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"X: y\r\n")
            time.sleep(0.2)


def _rest(connection):
    """What the server sends until it closes the connection."""
    with connection, connection.makefile("rb") as file:
        try:
            return file.read()
        except (ConnectionResetError, BrokenPipeError):  # it was closed while something was sent
            return b""


def test_clients_that_send_half_a_request_are_not_kept(tiny_pair, start_server):
    """Else they would use up the descriptors, and nobody else could connect."""
    head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
    with start_server("--model-path", str(tiny_pair.target), sabotage=_HASTY) as server:
        host, port = server.url.removeprefix("http://").split(":")
        ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        halves = [b"", head.encode(), f"{head}\r\n{{".encode(), ask]
        connections = [socket.create_connection((host, int(port)), timeout=10) for _ in halves]
        for connection, half in zip(connections, halves, strict=True):
            connection.sendall(half)
        begin = time.monotonic()
        trickle = threading.Thread(target=_drip, args=(connections[1],))  # it changes nothing
        trickle.start()
        assert connections[3].recv(4096).startswith(b"HTTP/1.1 200 OK")
        connections[3].sendall(ask[:9])  # nor does a whole request before
        said = [_rest(connection) for connection in connections]
        assert time.monotonic() - begin < 4
        trickle.join()
        assert said[:2] == [b"", b""]
        assert b"408 Request Timeout" in said[2]
        assert b"did not arrive within 1 seconds" in said[2]
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            for _ in range(2):  # a pause after an answer is uvicorn's to limit
                connection.sendall(ask)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
                time.sleep(1.5)
        assert "Traceback" not in server.log


def test_the_ready_line_is_the_only_output_and_memory_is_small(server):
    tree = "algorithm=DDTREE budget=16 topk_cap=8 expansion=best_first"
    assert server.ready_line == f"ready: {server.url} model=tiny {tree}\n"
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])
    assert resident < 1.2e6
    assert "transformers" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_port_in_use_is_said_before_anything_is_loaded(server):
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "toolkit.ddtree.server", "--model-path", "/nowhere", "--port", port]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == f"ddtree server: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert result.stdout == ""


def test_of_two_that_start_at_once_one_is_told():
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(StartError, match="Address already in use"):
            listen(second)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model-path", "/nowhere"], "/nowhere"),
        (["{tree}", "--speculative-ddtree-budget", "3"], "budget"),
        (
            ["{tree}", "--speculative-ddtree-debug-metrics", "--speculative-ddtree-debug-file", "/nowhere/x"],
            "/nowhere/x: No such file",
        ),
        (["--model-path", "{no_tokenizer}"], "tokenizer.json"),
        (["--model-path", "{bad_template}"], "chat template"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line_with_exit_code_2(
    tiny_pair, lucky_pair, tree_arguments, tmp_path, capsys, flags, said
):
    template = tmp_path / "target"
    template.mkdir()
    for path in tiny_pair.target.iterdir():
        (template / path.name).symlink_to(path)
    (template / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for %}"}))
    places = {"target": tiny_pair.target, "no_tokenizer": lucky_pair.target, "bad_template": template}
    arguments = []
    for flag in flags:
        arguments += tree_arguments if flag == "{tree}" else [flag.format(**places)]
    assert main(["--port", "0", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("ddtree server: ")
    assert err.count("\n") == 1


def test_too_little_memory_is_said_in_one_line(tree_arguments, monkeypatch, capsys):
    monkeypatch.setattr(main_module, "_load_engine", lambda config: torch.empty(1 << 60))
    assert main(["--port", "0", *tree_arguments]) == 1
    said = capsys.readouterr().err
    assert said.endswith("there is not enough memory to load it\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("tokenizer_config.json", b"[" * 200_000, "tokenizer_config.json: is nested too deeply"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: is not a JSON object"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read"),
    ],
)
def test_a_damaged_chat_template_is_named(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said):
        ChatTemplate(tmp_path)


def test_the_bundled_pair_serves_python_and_accepts_drafts(start_server):
    flags = ["--model-path", "bundled", "--speculative-draft-model-path", "bundled"]
    with start_server(*flags, "--speculative-algorithm", "DDTREE", "--cpu-threads", "1") as server:
        prompt = "import os\n\n\ndef read_lines(path):\n"
        answer = server.generate(prompt, sampling_params={"max_new_tokens": 64})
        assert answer["text"][0] in " \t", "a function's body is indented"
        assert answer["meta_info"]["spec_accept_length"] > 2
        body = {
            "text": prompt,
            "sampling_params": {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True},
        }
        events = server.stream("/generate", body)
        assert events[-1]["text"] == answer["text"]
        assert server.client.get("/server_info").json()["served_model_name"] == "bundled"
