"""Connections whose request does not come: they are closed, or idle clients would use up the descriptors."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that gives the head of each request `HEAD_SECONDS` to arrive.

    uvicorn alone limits only the pause between an answer and the first byte of the next request.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Begin to wait for a head, go on waiting, or see that it is there."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
