"""Sessions against the stub, with outputs short enough for quick tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

from toolkit.acceptance.endpoint import Endpoint
from toolkit.acceptance.prompts import load_prompts
from toolkit.acceptance.session import Session
from toolkit.acceptance.settings import Settings

_SPEC = importlib.util.spec_from_file_location("acceptance_stub", Path(__file__).with_name("stub.py"))
stub = importlib.util.module_from_spec(_SPEC)
sys.modules["acceptance_stub"] = stub
_SPEC.loader.exec_module(stub)

PROMPTS = [text[:40] for text in load_prompts()]


def telling(send, state):
    """`send` that lets the stub know how many requests come at once, so that it can wait for them all."""

    def told(asks, *, concurrency, way="whole"):
        state.expect(min(concurrency, len(asks)))
        return send(asks, concurrency=concurrency, way=way)

    return told


@pytest.fixture
def serve():
    """Starts stubs with the given faults; they are closed after the test."""
    running = []

    def start(**faults):
        running.append(stub.Stub(**faults))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def open_session(serve):
    """A session against a stub with the given faults; `settings` changes its settings, unchecked."""
    endpoints = []

    def start(settings=None, **faults):
        server = serve(**faults)
        chosen = Settings(url=server.url).model_copy(update={"max_new_tokens": 9, **(settings or {})})
        endpoint = Endpoint(server.url, request_timeout=5)
        endpoints.append(endpoint)
        endpoint.detect()
        session = Session(endpoint, chosen, PROMPTS)
        session.stub = server.state
        session.send = telling(session.send, server.state)
        return session

    yield start
    for endpoint in endpoints:
        endpoint.close()
