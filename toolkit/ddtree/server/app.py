"""The routes. Bodies are read, limited and parsed here; everything else is a call into the service."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from toolkit.ddtree.server import answers, protocol, requests
from toolkit.ddtree.server.answers import Answer, OpenAIFormat
from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.service import Service
from toolkit.ddtree.types import Request as EngineRequest
from toolkit.ddtree.types import SamplingParams

log = logging.getLogger(__name__)

Parsed = TypeVar("Parsed")

_BIG_BODY = 64 << 10
_HEALTH_SECONDS = 20.0
_BODY_SECONDS = 60.0
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service) -> FastAPI:
    """The ASGI application around `service`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    args = service.args
    app.include_router(_open_router(service))
    for router in (_generation_router(service), _info_router(service)):
        app.include_router(router, dependencies=[Depends(_bearer(args.api_key))])
    admin_key = args.admin_api_key or args.api_key
    app.include_router(_admin_router(service), dependencies=[Depends(_bearer(admin_key))])
    app.exception_handler(ApiError)(_on_api_error)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(Exception)(_on_fault)
    return app


def _open_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.runner.alive else 503)

    return router


def _generation_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Generates one token, so 200 means that the engine works."""
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probe = EngineRequest(f"health-{uuid.uuid4().hex}", (0,), sampling, extra_key="health")
        found = service.submit([requests.Job(probe, skip_special_tokens=True, trim_stop=True)], counted=False)
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await _unless_gone(request, service, found)
        except TimeoutError:
            raise ApiError(503, f"No token within {_HEALTH_SECONDS:.0f} seconds.") from None
        return Response()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body, jobs, is_batch = await _parsed(request, service, _parse_generate)
        found = service.submit(jobs)
        if body.stream:
            events = answers.generate_stream(service.runner, found, service.limits, is_batch=is_batch)
            return EventStream(events, lambda: _abort(service, found))
        await _unless_gone(request, service, found)
        objects = [answers.generate_object(answer, service.limits) for answer in found]
        return JSONResponse(objects if is_batch else objects[0])

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, jobs = await _parsed(request, service, _parse_completion)
        return await _openai(request, service, body, jobs, chat=False)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, jobs = await _parsed(request, service, _parse_chat)
        return await _openai(request, service, body, jobs, chat=True)

    return router


def _info_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return await _parsed(request, service, _tokenize)

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return service.model_info()

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return service.server_info()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.render_metrics(), media_type=_PROMETHEUS)

    return router


def _admin_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        await service.runner.call(lambda engine: engine.flush_cache())
        return PlainTextResponse("Cache flushed.\n")

    @router.api_route("/ddtree/self_check", methods=["GET", "POST"])
    async def self_check() -> dict[str, Any]:
        from toolkit.ddtree.self_check import self_check as run

        checks = await service.runner.call(run)
        return {"ok": all(check["ok"] for check in checks), "checks": [_finite(check) for check in checks]}

    return router


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same with null for what JSON cannot say: NaN and infinities."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _parse_generate(service: Service, data: bytes) -> tuple[protocol.GenerateBody, list[requests.Job], bool]:
    body = protocol.parse_generate(protocol.parse_json(data))
    return body, *requests.generate_jobs(body, service.model)


def _parse_completion(service: Service, data: bytes) -> tuple[protocol.CompletionBody, list[requests.Job]]:
    body = protocol.parse_completion(protocol.parse_json(data))
    service.check_model(body.model)
    return body, requests.completion_jobs(body, service.model)


def _parse_chat(service: Service, data: bytes) -> tuple[protocol.ChatBody, list[requests.Job]]:
    body = protocol.parse_chat(protocol.parse_json(data))
    service.check_model(body.model)
    return body, [requests.chat_job(body, service.encode_chat(body.messages), service.model)]


def _tokenize(service: Service, data: bytes) -> dict[str, Any]:
    body = protocol.parse_tokenize(protocol.parse_json(data))
    service.check_model(body.model)
    return service.tokenize(body.prompt, special=body.add_special_tokens is not False)


async def _parsed(request: Request, service: Service, parse: Callable[[Service, bytes], Parsed]) -> Parsed:
    """Read and parse a body; a big one on another thread, so that the streams of others do not halt."""
    data = await _read_body(request, service.args.max_request_bytes)
    if len(data) > _BIG_BODY:
        return await asyncio.to_thread(parse, service, data)
    return parse(service, data)


async def _openai(
    request: Request, service: Service, body: protocol.OpenAIBody, jobs: Sequence[requests.Job], *, chat: bool
) -> Response:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "`stream_options` needs `stream`.", param="stream_options")
    found = service.submit(jobs)
    form = OpenAIFormat(
        found[0].generation.rid,
        service.args.served_model_name,
        chat=chat,
        token_ids=bool(body.return_token_ids),
    )
    if body.stream:
        events = answers.openai_stream(service.runner, found, form, body.stream_options)
        return EventStream(events, lambda: _abort(service, found))
    await _unless_gone(request, service, found)
    return JSONResponse(form.whole(found))


class EventStream(StreamingResponse):
    """Server-sent events; `on_close` is called however the connection ends.

    Args:
        events: encoded events.
        on_close: ends what still runs.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def _abort(service: Service, found: Sequence[Answer]) -> None:
    for answer in found:
        service.runner.abort(answer.generation)


async def _unless_gone(request: Request, service: Service, found: Sequence[Answer]) -> None:
    """Wait for whole answers; a client that hangs up ends them.

    Raises:
        ApiError: as `answers.whole`; 499 if the client has gone.
    """
    work = asyncio.ensure_future(answers.whole(service.runner, found))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise _gone()
        work.result()
    finally:
        gone.cancel()
        work.cancel()
        _abort(service, found)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, limit: int) -> bytes:
    """The body.

    A page in a browser can post `text/plain` to a server on this machine without asking, but not
    JSON, so the content type must say JSON.

    Raises:
        ApiError: 413 if it is longer than `limit` bytes, 415 if it says that it is not JSON, 408 if it does
            not arrive in time.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "The content type must be application/json.")
    announced = request.headers.get("content-length", "0")
    too_long = ApiError(413, f"The body is longer than {limit} bytes.", code="request_too_large")
    if announced.isdigit() and int(announced) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {_BODY_SECONDS:g} seconds.") from None
    except ClientDisconnect:
        raise _gone() from None
    return bytes(body)


_CLIENT_GONE = 499  # as nginx logs it


def _gone() -> ApiError:
    return ApiError(_CLIENT_GONE, "The client closed the connection.")  # for nobody to see


class _Silence(Response):
    """Sends nothing: on a connection that the client has closed, sending is a protocol error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""


def _bearer(key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that refuses requests without `Authorization: Bearer KEY`; None lets all pass."""
    expected = f"Bearer {key}".encode()

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if key is not None and not hmac.compare_digest(given, expected):
            raise ApiError(
                401, "A valid API key is needed: `Authorization: Bearer KEY`.", code="invalid_api_key"
            )

    return check


_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # what is still to come of its body is no request
    503: {"Retry-After": "1"},
}


async def _on_api_error(_request: Request, error: ApiError) -> Response:
    if error.status == _CLIENT_GONE:
        return _Silence()
    headers = _HEADERS.get(error.status)
    return JSONResponse(error.body(), error.status, headers)


async def _on_http_error(_request: Request, error: HTTPException) -> Response:
    body = ApiError(error.status_code, str(error.detail)).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(ApiError(500, "The server failed on this request; see its log.").body(), 500)
