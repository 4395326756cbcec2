"""Limits that hold whatever others do: of a connection, and of looking a host's name up."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from types import TracebackType
from typing import Self


class Deadline:
    """Shuts a socket down once its time is over, so that whoever reads from it comes back; a context manager.

    A socket's own timeout begins anew with each byte: informational answers (RFC 9110, section 15.2) or
    headers that come one by one outlast it for ever.

    Attributes:
        over: whether the time was over before the body ended.

    Args:
        seconds: how long the body may take.
    """

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._socket: socket.socket | None = None
        self._ended = False
        self._guard = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._guard:  # the connection may serve another purpose from now on
            self._ended = True

    def watch(self, connection: socket.socket) -> None:
        """Shut this socket down at the end, in place of any other; at once where the time is over already."""
        with self._guard:
            self._socket = connection
            if self.over:
                self._shut()

    def _end(self) -> None:
        with self._guard:
            if not self._ended:
                self.over = True
                self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # Not by TLS, whose state belongs to the thread that reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def look_up(name: str, seconds: float) -> None:
    """Let a host's name be looked up before it is connected to; the connection says if there is no such name.

    getaddrinfo(3) takes no limit: name servers that are silent hold it for attempts times timeout times their
    number times the search domains (resolv.conf(5)), and connecting takes its own limit only after that.

    Args:
        name: name or address of the host.
        seconds: how long that may take.

    Raises:
        TimeoutError: there was no answer by then.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        answered.set()

    answered = threading.Event()
    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(max(seconds, 0.0)):
        raise TimeoutError(f"{name} was not looked up within {seconds:.3g} s: the name server is silent")
