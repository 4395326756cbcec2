"""An HTTP client whose requests end in time, whatever comes back."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from toolkit.deadline import Deadline, look_up

_CONNECTS = "connect_tcp.started"
_CONNECTED = ("connect_tcp.complete", "start_tls.complete")
_LARGEST = 16 << 20  # bytes of an answer that is got whole, unpacked


class Line:
    """One client with one request at a time; a context manager that closes it.

    Args:
        base: URL that paths are below; "" where whole URLs are asked for.
        verify: how certificates are checked; None reads this machine's authorities.
        keep: seconds for which an idle connection is kept.
        trust_env: whether the environment's proxies are used.
    """

    def __init__(
        self,
        base: str = "",
        *,
        verify: ssl.SSLContext | None = None,
        keep: float = 5.0,
        trust_env: bool = True,
    ) -> None:
        self._client = httpx.Client(
            base_url=base,
            verify=True if verify is None else verify,
            limits=httpx.Limits(keepalive_expiry=keep),
            trust_env=trust_env,
        )
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connection."""
        self._client.close()

    @contextmanager
    def stream(self, method: str, url: str, *, seconds: float, **options: Any) -> Iterator[httpx.Response]:
        """An answer whose body is yet to be read.

        Args:
            method: of the request.
            url: whole, or a path below the base.
            seconds: until the body of the `with` statement must be through.
            options: as `httpx.Client.stream` takes them.

        Raises:
            httpx.ReadTimeout: the time was over.
            httpx.ConnectError: it was over with nothing but a name looked up, or nothing listens.
            httpx.HTTPError: no answer came.
        """
        with Deadline(seconds) as deadline:
            if self._socket is not None:  # a kept connection
                deadline.watch(self._socket)

            def trace(event: str, info: Mapping[str, Any]) -> None:
                if event.endswith(_CONNECTS):
                    _look_up(info["host"], seconds)
                if event.endswith(_CONNECTED):
                    self._socket = info["return_value"].get_extra_info("socket")
                    if self._socket is not None:
                        deadline.watch(self._socket)

            try:
                with self._client.stream(
                    method, url, timeout=seconds, extensions={"trace": trace}, **options
                ) as response:
                    yield response
            except httpx.HTTPError as error:
                if not deadline.over or isinstance(error, httpx.ConnectError):
                    raise
            if deadline.over:  # without a length, the end of the connection is that of the answer
                raise httpx.ReadTimeout(f"it did not end within {seconds:g} s")

    def get(self, url: str, *, seconds: float, **options: Any) -> httpx.Response:
        """A whole answer, of at most 16 MiB once it is unpacked. Arguments and errors as `stream`."""
        data = bytearray()
        with self.stream("GET", url, seconds=seconds, **options) as response:
            for piece in response.iter_bytes():
                data += piece
                if len(data) > _LARGEST:
                    raise httpx.ReadError(f"it is larger than {_LARGEST >> 20} MiB")
        return received(response, data)


def _look_up(name: str, seconds: float) -> None:
    try:
        look_up(name, seconds)
    except TimeoutError as error:
        raise httpx.ConnectError(str(error)) from None


def received(response: httpx.Response, data: bytes | bytearray) -> httpx.Response:
    """An answer with its body, which was unpacked as it came."""
    headers = [(key, value) for key, value in response.headers.items() if key != "content-encoding"]
    return httpx.Response(
        response.status_code, headers=headers, content=bytes(data), request=response.request
    )
