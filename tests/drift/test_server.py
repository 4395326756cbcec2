"""Servers that tell their configuration in an odd way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from toolkit.drift.server import drifts
from toolkit.profile.loading import load_profile
from toolkit.service.unit import Unit

Answer = Callable[[bytes], int]


@pytest.fixture
def answering() -> Iterator[Answer]:
    """Starts a server that gives one answer; its port."""
    with contextlib.ExitStack() as held:

        def start(body: bytes) -> int:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            held.callback(thread.join, 5)
            return int(listener.getsockname()[1])

        yield start


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b"[" * 200_000, b"no json"])
def test_an_answer_that_is_no_object_is_a_drift(answering: Answer, body: bytes) -> None:
    profile = load_profile("local-cpu").profile
    unit = Unit("stub", "r", "", ("true",), {}, "/", "127.0.0.1", answering(body), load_timeout=1.0)
    (found,) = drifts(unit, profile, time.time())
    assert (found.subject, found.mend) == (unit.url, "hand")
    assert found.found.startswith("does not tell its configuration: ")
