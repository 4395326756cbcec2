"""Ready means a real token."""

import contextlib
import http.server
import json
import re
import socket
import threading
import time
from typing import ClassVar

import pytest
from stub_service import StubService

from toolkit.release import view
from toolkit.service.readiness import NotReadyError, generate_once, wait_ready

ALIVE = str


class Answers(http.server.BaseHTTPRequestHandler):
    script: ClassVar[list] = []
    seen: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.path, self.headers.get("Authorization"), body))
        status, value = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if value is None:
            time.sleep(30)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(value if isinstance(value, bytes) else json.dumps(value).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """Runs a script of answers, the last of which is repeated."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as httpd:
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        Answers.seen = []
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_waits_through_all_that_is_no_token(server):
    Answers.script = [
        (503, {"error": "loading"}),
        (200, {"text": "", "output_ids": [], "meta_info": {"completion_tokens": 0}}),
        (200, b"not json"),
        (200, []),
        (200, b"[" * 200_000),
        (200, {"output_ids": [5]}),
    ]
    assert wait_ready(server, 10, ended=ALIVE, api_key="k e", poll=0.01) > 0
    assert len(Answers.seen) == 6
    path, authorization, body = Answers.seen[0]
    assert (path, authorization) == ("/generate", "Bearer k e")
    assert body["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize(
    "value", [{"output_ids": [0]}, [{"output_ids": [3]}], {"meta_info": {"completion_tokens": 1}}]
)
def test_forms_of_a_token(server, value):
    Answers.script = [(200, value)]
    assert generate_once(server, 5) == ""


def test_refusal_is_told(server):
    Answers.script = [(401, {"error": "no key"})]
    assert generate_once(server, 5) == '/generate answered 401 {"error": "no key"}'


def test_never_ready_ends_in_time_with_the_last_answer(server):
    Answers.script = [(503, {"error": "loading"})]
    begin = time.monotonic()
    with pytest.raises(
        NotReadyError, match=r"no token within the load timeout of 1 s; last: /generate answered 503"
    ):
        wait_ready(server, 1.0, ended=ALIVE, poll=0.02)
    assert time.monotonic() - begin < 3


def test_a_request_that_the_end_cuts_short_hides_no_answer(server):
    Answers.script = [(503, {"error": "loading"}), (200, None)]
    with pytest.raises(NotReadyError, match=r"load timeout of 1 s; last: /generate answered 503"):
        wait_ready(server, 1.0, ended=ALIVE, poll=0.02)


def test_a_server_that_falls_silent_is_told(server):
    Answers.script = [(503, {"error": "loading"}), (200, None)]
    begin = time.monotonic()
    with pytest.raises(
        NotReadyError, match=r"last: /generate answered 503 .*, then no answer for "
    ) as caught:
        wait_ready(server, 2.2, ended=ALIVE, poll=0.02)
    silent = int(re.search(r"for (\d+) s$", caught.value.message)[1])
    assert 1 <= silent <= round(time.monotonic() - begin)


def test_hanging_request_does_not_outlast_the_timeout(server):
    Answers.script = [(200, None)]
    begin = time.monotonic()
    with pytest.raises(NotReadyError, match=r"no answer yet|timed out"):
        wait_ready(server, 0.3, ended=ALIVE, poll=0.02)
    assert time.monotonic() - begin < 3


@pytest.fixture
def endless():
    """Port of a server that says for ever that it goes on."""
    done = threading.Event()

    def serve():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            while not done.wait(0.02):
                connection.sendall(said)

    said = b"HTTP/1.1 100 Continue\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        done.set()
        thread.join(5)


def test_a_server_that_goes_on_saying_continue_is_left_in_time(endless):
    begin = time.monotonic()
    told = generate_once(f"http://127.0.0.1:{endless}", 0.5)
    assert told == "/generate timed out: its answer did not end within 0.5 s"
    assert time.monotonic() - begin < 3


def test_its_health_is_not_waited_for_either(endless, monkeypatch):
    monkeypatch.setattr(view, "_HEALTH_LIMIT", 0.5)
    service = StubService(None)
    service.port = endless
    begin = time.monotonic()
    assert not view._healthy(service.unit("any"))
    assert time.monotonic() - begin < 3


def test_an_answer_that_is_no_http_is_told_by_the_request_itself():
    """A request that ended in a traceback would be waited for until the load timeout."""

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        told = generate_once(f"http://127.0.0.1:{listener.getsockname()[1]}", 5)
        thread.join(5)
    assert told.startswith("ValueError: ")


def test_dead_process_ends_the_wait_at_once(server):
    Answers.script = [(200, None)]
    said = iter(["", "", "the server ended with status 3"])
    begin = time.monotonic()
    with pytest.raises(NotReadyError, match="status 3"):
        wait_ready(server, 60, ended=lambda: next(said), poll=0.02)
    assert time.monotonic() - begin < 3


def test_nobody_listens():
    assert "refused" in generate_once("http://127.0.0.1:1", 2)
