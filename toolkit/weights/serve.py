"""Handing a checkpoint out to peers, for the length of one transfer.

TLS with a certificate that was made for this transfer and is the only one that the other side trusts, and a
token without which nothing is told. SSH would do, too, but needs a key in somebody's `authorized_keys`, that
stays there when a control machine dies; this ends by itself. Only files that the checkpoint's marker names
are given, by ranges, so that a peer resumes as it does anywhere else.
"""

from __future__ import annotations

import hmac
import http.server
import json
import os
import re
import socket
import socketserver
import ssl
import threading
import time
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

from toolkit.errors import ToolkitError
from toolkit.weights.origins import LISTING
from toolkit.weights.pace import Bucket
from toolkit.weights.store import Marker, damage, read_marker, shortened

IDLE = 600.0
_HANDSHAKE = 20.0
_RANGE = re.compile(r"bytes=(\d+)-")


class Seed(http.server.ThreadingHTTPServer):
    """A server of one checkpoint; `serve_forever` returns once nobody has asked for long.

    Args:
        folder: the checkpoint.
        address: to listen on; "" for all.
        port: to listen on; 0 for a free one.
        token: that peers have to send.
        context: its certificate.
        rate: bytes a second for all peers together; None does not limit.
        idle: seconds without a request after which it ends.

    Raises:
        ToolkitError: the checkpoint is incomplete or has changed, or the port cannot be had.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        folder: Path,
        *,
        address: str,
        port: int,
        token: str,
        context: ssl.SSLContext,
        rate: int | None = None,
        idle: float = IDLE,
    ) -> None:
        marker = read_marker(folder)
        if marker is None or (wrong := damage(folder)):
            why = "it is not there" if marker is None else shortened(wrong)
            raise ToolkitError(f"{folder} cannot be handed out: {why}", hint="deploy it there first")
        self.folder, self.marker, self.token = folder, marker, token
        self.bucket, self.stop = Bucket(rate), threading.Event()
        self._context = context
        self._idle = idle
        self._busy = 0
        self._last = time.monotonic()
        self._guard = threading.Lock()
        # Dual-stack where there is IPv6 (RFC 3493, 5.3).
        every = [address] if address else ["::", "0.0.0.0"]  # noqa: S104  token and certificate guard it
        for number, one in enumerate(every, 1):
            self.address_family = socket.AF_INET6 if ":" in one else socket.AF_INET
            try:
                super().__init__((one, port), _Handler)
                break
            except OSError as error:
                if number == len(every):
                    raise ToolkitError(f"{one} port {port}: {error.strerror or error}") from None

    def server_bind(self) -> None:
        """Bind, without the base class's question to DNS for this machine's name."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", int(self.server_address[1])

    def finish_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Shake hands in the connection's own thread, so that a silent client holds up nobody."""
        with self._guard:
            self._busy += 1
        try:
            request.settimeout(_HANDSHAKE)
            with self._context.wrap_socket(request, server_side=True) as secure:
                super().finish_request(secure, client_address)
        finally:
            with self._guard:
                self._busy -= 1
                self._last = time.monotonic()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away or speaks no TLS is nobody's business."""

    def service_actions(self) -> None:
        """End when it has been idle for long; called twice a second."""
        with self._guard:
            idle = not self._busy and time.monotonic() - self._last > self._idle
        if idle:
            self.end()

    def end(self) -> None:
        """Let `serve_forever` return, from any thread."""
        if not self.stop.is_set():
            self.stop.set()
            threading.Thread(target=self.shutdown, daemon=True).start()


def listing(marker: Marker) -> dict[str, object]:
    """What peers are told of a checkpoint."""
    files = {path: {"size": mark.size, "sha256": mark.sha256} for path, mark in marker.files.items()}
    return {"source": marker.source, "revision": marker.revision, "files": files}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Seed
    protocol_version = "HTTP/1.1"
    server_version = "ddtoolkit"
    sys_version = ""
    timeout = 60.0

    def do_HEAD(self) -> None:
        """Tell what GET would."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """Give the listing or a file."""
        self._answer(body=True)

    def do_DELETE(self) -> None:
        """End the server."""
        if self._may():
            self._head(HTTPStatus.OK, 0)
            self.server.end()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write no log."""

    def _answer(self, *, body: bool) -> None:
        if not self._may():
            return
        path = unquote(self.path).removeprefix(f"/{self.server.folder.name}/")
        if path == LISTING:
            data = json.dumps(listing(self.server.marker)).encode()
            self._head(HTTPStatus.OK, len(data))
            self.wfile.write(data if body else b"")
            return
        mark = self.server.marker.files.get(path)
        if mark is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        try:
            fd = os.open(self.server.folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        try:
            if not mark.fits(os.fstat(fd)):
                self._refuse(HTTPStatus.GONE)
                return
            start = self._start(mark.size)
            if start is not None:
                self._head(HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK, mark.size - start, start)
                if body:
                    self._send(fd, start, mark.size)
        finally:
            os.close(fd)

    def _may(self) -> bool:
        """Whether who asks has the token; if not, that is told."""
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED)
        return False

    def _start(self, size: int) -> int | None:
        """The first byte that is asked for; None where that was refused."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        if start and start >= size:
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return None
        return start

    def _send(self, fd: int, position: int, end: int) -> None:
        bucket, stop = self.server.bucket, self.server.stop
        while position < end:
            data = os.pread(fd, min(bucket.chunk, end - position), position)
            if not data:
                self.close_connection = True
                return
            self.wfile.write(data)
            position += len(data)
            bucket.take(len(data), stop)

    def _head(self, status: HTTPStatus, length: int, start: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {start}-{start + length - 1}/{start + length}")
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self._head(status, 0)
