"""Ready means a real generated token.

A server answers `/health` and `/v1/models` before its model is warm, so neither is asked here.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.deadline import Deadline
from toolkit.errors import ToolkitError
from toolkit.files import parse_json
from toolkit.service.unit import seconds

_PROMPT = "def add(a, b):\n    return"
_POLL = 0.05
_LOOK = 0.2  # seconds between looks at the process
_MAX_ANSWER = 1 << 20
_NOTHING = "no answer yet"


class NotReadyError(ToolkitError):
    """The server gave no token: it ended, or the time was over."""


@dataclass(slots=True)
class _Answer:
    """What one request in its own thread came to."""

    done: threading.Event = field(default_factory=threading.Event)
    ready: bool = False
    cut: bool = False
    problem: str = _NOTHING


def generate_once(url: str, timeout: float, *, api_key: str | None = None) -> str:
    """Ask for one greedy token through POST /generate; return why none came, "" when one did."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    headers, deadline = {"Content-Type": "application/json"}, Deadline(timeout)
    late = f"/generate timed out: its answer did not end within {seconds(timeout)}"
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    body = {"text": _PROMPT, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        with deadline:
            connection.connect()
            deadline.watch(connection.sock)
            connection.request("POST", "/generate", json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read(_MAX_ANSWER)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of a negative chunk size
        if deadline.over:
            return late
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    finally:
        connection.close()
    if deadline.over:  # without a length, the end of the connection is that of the answer
        return late
    if response.status != http.client.OK:
        return f"/generate answered {response.status} {data[:200].decode('utf-8', 'replace')}"
    return "" if _holds_token(data) else "/generate answered without a token"


def wait_ready(
    url: str,
    timeout: float,
    *,
    ended: Callable[[], str],
    answered: Callable[[], str] = lambda: "",
    api_key: str | None = None,
    poll: float = _POLL,
) -> float:
    """Wait until the server at `url` has generated a token.

    Args:
        url: base URL.
        timeout: seconds until it counts as failed; the unit's load timeout.
        ended: asked at each look; what it returns other than "" ends the wait as a failure with that reason.
        answered: asked once a token came; what it returns other than "" is why that was not the server's.
        api_key: bearer token, when the server wants one.
        poll: seconds between looks.

    Returns:
        Seconds it took.

    Raises:
        NotReadyError: the process ended, or the time was over.
    """
    begin = looked = time.monotonic()
    problem = _NOTHING
    while True:
        asked = time.monotonic()
        answer = _ask(url, begin + timeout - asked, api_key)
        while not answer.done.wait(_LOOK):
            _check(ended, begin, timeout, _with_silence(problem, asked))
        told = answered() if answer.ready else answer.problem
        if not told:
            return time.monotonic() - begin
        # A request that the end of the wait cut short says less than what was heard before it.
        problem = _with_silence(problem, asked) if answer.cut and problem != _NOTHING else told
        if answer.cut or time.monotonic() - looked >= _LOOK:
            _check(ended, begin, timeout, problem)
            looked = time.monotonic()
        time.sleep(poll)


def _ask(url: str, timeout: float, api_key: str | None) -> _Answer:
    answer = _Answer()
    deadline = time.monotonic() + timeout

    def ask() -> None:
        answer.problem = generate_once(url, max(timeout, 0.1), api_key=api_key)
        answer.ready = not answer.problem
        answer.cut = not answer.ready and time.monotonic() >= deadline
        answer.done.set()

    # A daemon: a server that takes the request and never answers must not hold anything up.
    threading.Thread(target=ask, daemon=True).start()
    return answer


def _with_silence(problem: str, asked: float) -> str:
    """What was heard last, and for how long nothing since where that is worth telling."""
    silent = time.monotonic() - asked
    return f"{problem}, then no answer for {seconds(round(silent))}" if silent >= 1 else problem


def _check(ended: Callable[[], str], begin: float, timeout: float, problem: str) -> None:
    if why := ended():
        raise NotReadyError(why)
    if time.monotonic() - begin > timeout:
        raise NotReadyError(
            f"no token within the load timeout of {seconds(timeout)}; last: {problem}",
            hint="raise service.load_timeout if the model loads for longer",
        )


def _holds_token(data: bytes) -> bool:
    try:
        value: Any = parse_json(data)
    except ValueError:
        return False
    if isinstance(value, list):
        value = value[0] if value else None
    if not isinstance(value, Mapping):
        return False
    if value.get("output_ids"):
        return True
    meta = value.get("meta_info")
    return isinstance(meta, Mapping) and bool(meta.get("completion_tokens"))
