"""Answers of any kind, since `test --url` speaks to servers that nobody here has made."""

import contextlib
import gzip
import json
import socket
import threading
import time

import httpx
import pytest

from toolkit.acceptance import endpoint as endpoint_module
from toolkit.acceptance.endpoint import Endpoint
from toolkit.acceptance.exchange import Ask, EndpointError, Identity, TimeUpError
from toolkit.acceptance.line import Line

ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def reply(body, headers=""):
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@contextlib.contextmanager
def answering(data, again=b"", pause=0.0):
    """An endpoint whose server answers every request with `data`, then with `again` without end."""

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(data)
            while again and not done.is_set():
                connection.sendall(again)
                time.sleep(pause)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        with Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", request_timeout=0.5) as made:
            yield made
        done.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("path", ["metrics", "models", "stream"])
def test_an_answer_that_never_ends_is_left_in_time(path):
    calls = {
        "metrics": Endpoint.metrics_text,
        "models": Endpoint.detect,
        "stream": lambda made: made.generate(Ask("a", 1), "openai_stream"),
    }
    begin = time.monotonic()
    with (
        answering(ENDLESS, again=b": still here\n\n", pause=0.02) as made,
        pytest.raises(EndpointError, match=r"did not end within 0\.5 s"),
    ):
        calls[path](made)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "again", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n", b"x: y\r\n"]
)
@pytest.mark.parametrize("path", ["whole", "stream"])
def test_an_answer_that_never_begins_is_left_in_time(again, path):
    """Informational answers without end, or headers."""
    begun = b"HTTP/1.1 200 OK\r\n" if again.startswith(b"x") else b""
    begin = time.monotonic()
    with answering(begun, again=again, pause=0.02) as made:
        with pytest.raises(EndpointError, match=r"was not answered: it did not end within 0\.5 s"):
            made.get_json("/a") if path == "whole" else made.generate(Ask("a", 1), "openai_stream")
        made._deadline = time.monotonic() + 0.2
        with pytest.raises(TimeUpError):
            made.get_json("/a")
    assert time.monotonic() - begin < 5


def test_a_kept_connection_is_left_in_time_too():
    """The second answer on it never begins."""
    asked = 0

    def serve(connection):
        nonlocal asked
        with connection, contextlib.suppress(OSError):
            while connection.recv(65536):
                asked += 1
                if asked == 1:
                    connection.sendall(reply(b"{}"))
                while asked > 1:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accept = threading.Thread(target=lambda: serve(listener.accept()[0]), daemon=True)
        accept.start()
        with Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", request_timeout=0.5) as made:
            assert made.get_json("/a") == {}
            with pytest.raises(EndpointError, match="did not end within"):
                made.get_json("/b")
        accept.join(5)
        assert (asked, accept.is_alive()) == (2, False)


def test_an_answer_that_outlasts_the_time_limit_is_that():
    with answering(ENDLESS, again=b" ", pause=0.02) as made:
        made._deadline = time.monotonic() + 0.2
        with pytest.raises(TimeUpError):
            made.detect()


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_that_would_fill_the_memory_is_left(monkeypatch, packed):
    monkeypatch.setattr(endpoint_module, "_LONGEST_ANSWER", 1 << 20)
    body = b" " * (2 << 20)
    data = reply(gzip.compress(body), "Content-Encoding: gzip\r\n") if packed else reply(body)
    with answering(data) as made, pytest.raises(EndpointError, match="answered more than 1048576 bytes"):
        made.detect()


def test_a_small_answer_that_unpacks_without_end_is_left():
    """What `status` asks: a few megabytes on the wire must not become gigabytes here."""
    packed = gzip.compress(b" " * (40 << 20))
    assert len(packed) < 100_000
    with (
        answering(reply(packed, "Content-Encoding: gzip\r\n")) as made,
        Line() as line,
        pytest.raises(httpx.ReadError, match="larger than 16 MiB"),
    ):
        line.get(made.url, seconds=5.0)


def test_a_packed_answer_is_got_whole():
    packed = gzip.compress(b'{"a": 1}')
    with answering(reply(packed, "Content-Encoding: gzip\r\n")) as made, Line() as line:
        answer = line.get(made.url, seconds=5.0)
    assert answer.raise_for_status().json() == {"a": 1}


def test_a_packed_answer_is_read():
    body = gzip.compress(json.dumps({"data": [{"id": "m"}]}).encode())
    with answering(reply(body, "Content-Encoding: gzip\r\n")) as made:
        assert made.detect().model == "m"


@pytest.mark.parametrize("data", [{"a": 1}, 1.5, [[]], True, "x"])
def test_what_is_no_list_of_models_names_none(data):
    with answering(reply(json.dumps({"data": data}).encode())) as made:
        assert made.detect().model == "default"


def test_what_is_nested_too_deeply_is_no_json():
    with answering(reply(b"[" * 200_000)) as made:
        with pytest.raises(EndpointError, match="answered no JSON"):
            made._json("GET", "/server_info")
        with pytest.raises(EndpointError, match="no inference server"):
            made.detect()


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [None]},
        {"choices": 5},
        {"choices": [{"text": "a", "token_ids": [[]]}]},
        {"choices": [{"text": "a"}], "usage": "x"},
        {"choices": [{"text": "a", "token_ids": [float("inf")]}]},
        {"choices": [{"text": 5, "token_ids": 5, "finish_reason": "length"}]},
    ],
)
@pytest.mark.parametrize("way", ["completions", "openai_stream"])
def test_an_answer_of_other_types_is_an_error_of_the_server(answer, way):
    said = json.dumps(answer).encode()
    data = reply(b"data: " + said + b"\n\ndata: [DONE]\n\n" if way == "openai_stream" else said)
    with answering(data) as made, pytest.raises(EndpointError, match=r"lacks something|broke off"):
        made.generate(Ask("a", 1), way)


@pytest.mark.parametrize(
    "meta", ["x", 5, {"spec_correct_drafts_histogram": 5}, {"spec_correct_drafts_histogram": [float("inf")]}]
)
def test_a_native_answer_of_other_types_is_one_too(meta):
    with answering(reply(json.dumps({"text": "a", "meta_info": meta}).encode())) as made:
        made.identity = Identity("sglang")
        with pytest.raises(EndpointError, match="lacks something"):
            made.generate(Ask("a", 1))
