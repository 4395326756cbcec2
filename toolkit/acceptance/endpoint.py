"""One served endpoint over HTTP: requests out, `Generation`s back, whichever server is behind it.

Requests are sent with SGLang's native `/generate` where the server has it, else with the OpenAI
`/v1/completions` (with vLLM's additions where it is vLLM). `detect` finds out which.
"""

from __future__ import annotations

import json
import ssl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from toolkit.acceptance.exchange import Ask, EndpointError, Generation, Identity, TimeUpError
from toolkit.acceptance.formats import (
    NativePieces,
    OpenAIPieces,
    native_body,
    native_identity,
    openai_body,
    read_native,
    read_openai,
)
from toolkit.acceptance.line import Line, received
from toolkit.errors import ToolkitError

Chunk = TypeVar("Chunk", str, bytes)
Way = Literal["whole", "completions", "native_stream", "openai_stream"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KEEP_IDLE = 2.0
_LONGEST_ANSWER = 64 << 20
# What reading an answer raises where it holds something else than was agreed.
_MISREAD = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


class Endpoint:
    """A served endpoint. Safe to use from several threads at once.

    Args:
        url: root URL, such as `http://127.0.0.1:30000`.
        api_key: sent as a bearer token, shown nowhere.
        admin_api_key: the same for `/flush_cache` and `/ddtree/self_check`; None takes `api_key`.
        request_timeout: seconds that one request may take.
        deadline: `time.monotonic` value after which `TimeUpError` is raised instead of a request.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        request_timeout: float = 60.0,
        deadline: float | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ToolkitError(f"{url!r} is no URL of a server", hint="write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.identity = Identity("openai")
        self._keys = {False: api_key, True: admin_api_key or api_key}
        self._timeout = request_timeout
        self._deadline = deadline
        # Reading the certificate authorities takes longer than a request, and http:// needs none.
        self._tls: ssl.SSLContext = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parts.scheme == "http" else httpx.create_ssl_context()
        )
        self._trust_env = parts.hostname not in _LOOPBACK
        self._idle: deque[Line] = deque()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _client(self, *, fresh: bool = False) -> Iterator[Line]:
        """A client of this request's own: a used one if there is one, unless it must be fresh.

        A client shared by threads may close a connection as expired that another thread has just been
        given. Connections are dropped well before servers drop them (uvicorn: after 5 s).
        """
        client = self._new_client() if fresh else self._kept_client()
        try:
            yield client
        finally:
            self._idle.append(client)

    def _kept_client(self) -> Line:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_client()

    def _new_client(self) -> Line:
        return Line(self.url, verify=self._tls, keep=_KEEP_IDLE, trust_env=self._trust_env)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()

    # The native dialect is SGLang's; everything else is spoken to in OpenAI's.
    @property
    def native(self) -> bool:
        """Whether the server has SGLang's `/generate`."""
        return self.identity.kind in ("embedded", "sglang")

    @property
    def token_ids(self) -> bool:
        """Whether token ids go in and come out."""
        return self.native or self.identity.kind == "vllm"

    @property
    def salt_field(self) -> str | None:
        """Name of the request field for a cache salt, None without one."""
        return {"embedded": "extra_key", "sglang": "extra_key", "vllm": "cache_salt"}.get(self.identity.kind)

    def _options(self, *, admin: bool = False) -> dict[str, Any]:
        left = self.remaining
        if left <= 0:
            raise TimeUpError("the time limit is reached")
        key = self._keys[admin]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return {"headers": headers, "seconds": min(self._timeout, max(left, 0.05))}

    def _fault(self, what: str, error: httpx.HTTPError) -> ToolkitError:
        if self.remaining <= 0:
            return TimeUpError("the time limit is reached")
        reason = str(error) or type(error).__name__
        return EndpointError(f"{self.url}: {what} was not answered: {reason}")

    def _refusal(self, what: str, response: httpx.Response) -> EndpointError:
        code = response.status_code
        hint = "give the server's API key" if code in (401, 403) else None
        body = response.text[:300].strip()
        return EndpointError(f"{self.url}: {what} answered {code}: {body}", status=code, hint=hint)

    def request(self, method: str, path: str, *, body: Any = None, admin: bool = False) -> httpx.Response:
        """Send one request and give the answer back if its status is 2xx.

        Raises:
            EndpointError: no answer, or one with another status.
            TimeUpError: the deadline is reached.
        """
        what = f"{method} {path}"
        try:
            try:
                with self._client() as client:
                    response = self._exchange(client, method, path, body, admin=admin)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                # The server may have closed a kept connection just then (RFC 9112, section 9.3.1): that is
                # no fault of its; one more try, on a connection of its own, tells.
                with self._client(fresh=True) as client:
                    response = self._exchange(client, method, path, body, admin=admin)
        except httpx.HTTPError as error:
            raise self._fault(what, error) from None
        if not response.is_success:
            raise self._refusal(what, response)
        return response

    def _exchange(self, client: Line, method: str, path: str, body: Any, *, admin: bool) -> httpx.Response:
        """One request and the whole answer, which may neither go on for ever nor fill the memory."""
        options = self._options(admin=admin)
        data = bytearray()
        with client.stream(method, path, json=body, **options) as response:
            for chunk in self._bounded(response.iter_bytes(), f"{method} {path}", options["seconds"]):
                data += chunk
        return received(response, data)

    def _bounded(self, chunks: Iterator[Chunk], what: str, seconds: float) -> Iterator[Chunk]:
        """The parts of an answer, as long as they are not too many and do not come for too long."""
        end = time.monotonic() + seconds
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size > _LONGEST_ANSWER:
                raise EndpointError(f"{self.url}: {what} answered more than {_LONGEST_ANSWER} bytes")
            if time.monotonic() > end:
                if self.remaining <= 0:
                    raise TimeUpError("the time limit is reached")
                raise EndpointError(f"{self.url}: the answer to {what} did not end within {seconds:g} s")
            yield chunk

    def _json(self, method: str, path: str, *, body: Any = None, admin: bool = False) -> Any:
        response = self.request(method, path, body=body, admin=admin)
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise EndpointError(
                f"{self.url}: {method} {path} answered no JSON: {response.text[:100]!r}",
                status=response.status_code,
            ) from None

    def get_json(self, *paths: str) -> Any | None:
        """The first of `paths` that the server has, as JSON; None if it has none of them.

        Raises:
            EndpointError: no answer at all, or a key is wanted (401, 403).
        """
        for path in paths:
            try:
                return self._json("GET", path)
            except EndpointError as error:
                if error.status is None or error.status in (401, 403):
                    raise
        return None

    def detect(self) -> Identity:
        """Find out what the server is; its identity decides how requests are written.

        Raises:
            EndpointError: nothing answers there, a key is wanted, or it is no such server.
        """
        models = self.get_json("/v1/models") or {}
        cards = models.get("data") if isinstance(models, dict) else None
        served: dict[str, Any] = (
            cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
        )
        info = self.get_json("/server_info", "/get_server_info")
        version = self.get_json("/version") if info is None else None
        name = str(served.get("id", "default"))
        if isinstance(info, dict):
            self.identity = native_identity(info, name)
        elif served.get("owned_by") == "vllm" or (isinstance(version, dict) and "version" in version):
            self.identity = Identity("vllm", version=str((version or {}).get("version", "")), model=name)
        elif served:
            self.identity = Identity("openai", model=name)
        else:
            raise EndpointError(
                f"{self.url}: has neither /server_info nor /v1/models: no inference server that is known",
                status=404,
            )
        return self.identity

    def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Token ids of a prompt as the server would read it; None where it does not tell."""
        body = {"model": self.identity.model, "prompt": text, "add_special_tokens": True}
        try:
            answer = self._json("POST", "/tokenize", body=body)
        except EndpointError as error:
            if not error.refused:
                raise
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            return None
        return tuple(tokens)

    def generate(self, ask: Ask, way: Way = "whole") -> Generation:
        """Answer one request.

        Args:
            ask: the request.
            way: "whole" takes the server's richest endpoint, "completions" `/v1/completions`; the streams
                are put together from `/generate` and from `/v1/completions`.

        Raises:
            EndpointError: no answer, a refusal, an answer without what was asked for, or a stream that
                breaks off.
            TimeUpError: the deadline is reached.
        """
        native = way == "native_stream" or (way == "whole" and self.native)
        if native:
            path, body = "/generate", native_body(ask)
        else:
            path, body = "/v1/completions", openai_body(ask, self.identity, self.salt_field)
        if way in ("native_stream", "openai_stream"):
            return self._stream(path, body, native=native)
        start = time.monotonic()
        answer = self._json("POST", path, body=body)
        seconds = time.monotonic() - start
        return replace(self._read(answer, native=native), seconds=seconds)

    def generate_together(self, asks: Sequence[Ask]) -> list[Generation]:
        """Answer several requests for token ids in one HTTP request (`/generate` with lists).

        Raises:
            EndpointError: as `generate`; the whole list fails with one of its requests.
            TimeUpError: the deadline is reached.
        """
        bodies = [native_body(ask) for ask in asks]
        body: dict[str, Any] = {
            name: [one[name] for one in bodies] for name in ("input_ids", "sampling_params")
        }
        if asks[0].salt is not None:
            body["extra_key"] = [ask.salt for ask in asks]
        start = time.monotonic()
        answers = self._json("POST", "/generate", body=body)
        seconds = time.monotonic() - start
        if not isinstance(answers, list) or len(answers) != len(asks):
            raise EndpointError(
                f"{self.url}: POST /generate answered {len(asks)} prompts otherwise", status=200
            )
        return [replace(self._read(answer, native=True), seconds=seconds) for answer in answers]

    def _stream(self, path: str, body: dict[str, Any], *, native: bool) -> Generation:
        body["stream"] = True
        if not native:
            body["stream_options"] = {"include_usage": True}
        join = NativePieces() if native else OpenAIPieces()
        start = time.monotonic()
        first: float | None = None
        for piece in self._events(path, body):
            try:
                join.add(piece)
            except _MISREAD:
                raise self._misread(piece) from None
            if first is None and join.started:
                first = time.monotonic() - start
        if not join.ended:
            length = len(join.text)
            raise EndpointError(f"{self.url}: the stream of POST {path} broke off after {length} characters")
        whole = self._read(join.whole(), native=native)
        return replace(whole, seconds=time.monotonic() - start, first_token_seconds=first)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        what = f"POST {path} (streamed)"
        try:
            with (
                self._client(fresh=True) as client,
                client.stream("POST", path, json=body, **(options := self._options())) as response,
            ):
                if not response.is_success:
                    response.read()
                    raise self._refusal(what, response)
                for line in self._bounded(response.iter_lines(), what, options["seconds"]):
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if data and line.startswith("data:"):
                        yield json.loads(data)
        except httpx.HTTPError as error:
            raise self._fault(what, error) from None
        except (ValueError, RecursionError):
            raise EndpointError(f"{self.url}: {what} sent an event that is no JSON", status=200) from None

    def _read(self, answer: Any, *, native: bool) -> Generation:
        try:
            return read_native(answer) if native else read_openai(answer)
        except _MISREAD:
            raise self._misread(answer) from None

    def _misread(self, answer: Any) -> EndpointError:
        said = f"{self.url}: the answer to a generation request lacks something: {str(answer)[:200]}"
        return EndpointError(said, status=200)

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False where the server cannot or may not."""
        try:
            self.request("POST", "/flush_cache", admin=True)
        except EndpointError as error:
            if not error.refused:
                raise
            return False
        return True

    def self_check(self) -> Any | None:
        """The engine's own report on itself as JSON; None where the server has none.

        Raises:
            EndpointError: no answer, or an answer other than 404.
        """
        try:
            return self._json("POST", "/ddtree/self_check", admin=True)
        except EndpointError as error:
            if error.status not in (404, 405):
                raise
            return None

    def metrics_text(self) -> str | None:
        """Prometheus text of `/metrics`; None where the server has none."""
        try:
            return self.request("GET", "/metrics/" if self.identity.kind == "vllm" else "/metrics").text
        except EndpointError as error:
            if not error.refused and error.status not in (301, 302, 307, 308):
                raise
            return None
