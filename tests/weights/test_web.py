"""HTTP of transfers, against servers that say what none should."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from toolkit.errors import ToolkitError
from toolkit.weights.certificate import one_time_certificate
from toolkit.weights.web import Web

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LISTING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextlib.contextmanager
def saying(*, first=b"", again=b"", context=None):
    """The port of a server that says `first`, and then `again` until the client goes; whether it went."""
    gone = threading.Event()

    def serve(listener):
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            if context is not None:
                connection = context.wrap_socket(connection, server_side=True)
            connection.recv(65536)
            connection.sendall(first)
            while again:
                connection.sendall(again)
                time.sleep(0.02)
        connection.close()
        gone.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1], gone


@pytest.mark.parametrize("again", [CONTINUE, b"x: y\r\n"], ids=["continue", "headers"])
def test_an_answer_that_never_begins_is_left_in_time(again):
    first = b"HTTP/1.1 200 OK\r\n" if again.startswith(b"x") else b""
    begin = time.monotonic()
    with saying(first=first, again=again) as (port, gone):
        with pytest.raises(ToolkitError, match=r"/listing: no answer began within 0\.5 s"):
            Web(silence=0.5).read(f"http://127.0.0.1:{port}/listing")
        assert gone.wait(5)
    assert time.monotonic() - begin < 5


def test_an_answer_that_never_begins_is_left_in_time_over_tls(tmp_path):
    certificate, key = one_time_certificate()
    kept = tmp_path / "both"
    kept.write_text(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kept)
    with saying(again=CONTINUE, context=context) as (port, gone):
        web = Web(silence=0.5, certificate=certificate)
        with pytest.raises(ToolkitError, match=r"/listing: no answer began within 0\.5 s"):
            web.read(f"https://127.0.0.1:{port}/listing")
        assert gone.wait(5)


def test_what_comes_before_an_answer_is_passed_over():
    with saying(first=CONTINUE * 3 + LISTING) as (port, _):
        assert Web(silence=5.0).json(f"http://127.0.0.1:{port}/listing") == {}


def test_a_body_may_take_longer_than_its_beginning():
    web = Web(silence=0.3)
    with (
        saying(first=b"HTTP/1.1 200 OK\r\n\r\n", again=b" ") as (port, _),
        web.open(f"http://127.0.0.1:{port}/") as body,
    ):
        begin = time.monotonic()
        while time.monotonic() - begin < 0.8:
            assert body.read(1) == b" "
