"""A real HTTP server as publishers have one: ranges, a hub's API, redirects, and faults on demand."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import ssl
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from toolkit.weights.pace import Bucket

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", "tokenizer.json")  # what a hub keeps in LFS


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        cuts: connections that are still to be broken, by file name.
        cut_after: bytes that such a connection brings first.
        without_ranges: answer with the whole file whatever is asked.
        statuses: status codes to answer with first, by file name.
        wrong_start: name a range that begins elsewhere.
        token: without it nothing is told.
        flip: byte of a file that is sent wrong, by name.
        flips: how often.
        redirect: base URL to which files are redirected.
        slow: seconds between two pieces.
    """

    cuts: Counter[str] = field(default_factory=Counter)
    cut_after: int = 1000
    without_ranges: bool = False
    statuses: dict[str, list[int]] = field(default_factory=dict)
    wrong_start: bool = False
    token: str | None = None
    flip: dict[str, int] = field(default_factory=dict)
    flips: int = 0
    redirect: str | None = None
    slow: float = 0.0


class Publisher(http.server.ThreadingHTTPServer):
    """Serves the folder `folder`, and as a hub the repository `org/model`, which has the same files.

    Attributes:
        faults: what goes wrong.
        asked: method, path and Range of each request.
        headers: of each request, by path.
        bucket: limits what is sent to all together.
        sent: bytes of files that were sent, the listing aside.
    """

    daemon_threads = True

    def __init__(
        self, folder: Path, *, context: ssl.SSLContext | None = None, address: str = "127.0.0.1"
    ) -> None:
        super().__init__((address, 0), _Handler)
        self.folder = folder
        self.faults = Faults()
        self.asked: list[tuple[str, str, str | None]] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.sent = 0
        self.guard = threading.Lock()
        self.scheme = "http"
        self.bucket = Bucket(None)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.scheme = "https"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.server_address[0]}:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that were cut off complain."""


@contextmanager
def publishing(folder: Path, *, context: ssl.SSLContext | None = None) -> Iterator[Publisher]:
    with Publisher(folder, context=context) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def hub_answer(folder: Path, revision: str) -> dict[str, object]:
    """What the hub's model API says with `blobs=true`."""
    siblings: list[dict[str, object]] = []
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        name, data = path.relative_to(folder).as_posix(), path.read_bytes()
        git = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()
        item: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": git}
        if name.endswith(LARGE):
            sha256 = hashlib.sha256(data).hexdigest()
            item |= {"blobId": "0" * 40, "lfs": {"sha256": sha256, "size": len(data), "pointerSize": 134}}
        siblings.append(item)
    return {"id": "org/model", "sha": COMMIT, "siblings": siblings}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Publisher
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        with self.server.guard:
            self.server.asked.append((self.command, self.path, self.headers.get("Range")))
            self.server.headers[path] = dict(self.headers)
        faults = self.server.faults
        if faults.token and self.headers.get("Authorization") != f"Bearer {faults.token}":
            self._plain(401, b"")
        elif match := re.fullmatch(r"/api/models/org/model/revision/([^/]+)", path):
            known = match[1] in ("main", COMMIT) and parts.query == "blobs=true"
            self._plain(200 if known else 404, json.dumps(hub_answer(self.server.folder, match[1])).encode())
        elif match := re.fullmatch(rf"/org/model/resolve/{COMMIT}/(.+)", path):
            if faults.redirect:
                self.send_response(302)
                self.send_header("Location", f"{faults.redirect}/folder/{match[1]}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._file(match[1], body=body)
        elif path.startswith("/folder/"):
            self._file(path.removeprefix("/folder/"), body=body)
        else:
            self._plain(404, b"")

    def _plain(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _file(self, name: str, *, body: bool) -> None:
        faults, path = self.server.faults, self.server.folder / name
        if faults.statuses.get(name) and body:
            self._plain(faults.statuses[name].pop(0), b"")
            return
        if not path.is_file():
            self._plain(404, b"")
            return
        data = bytearray(path.read_bytes())
        if body and faults.flips and name in faults.flip:
            faults.flips -= 1
            data[faults.flip[name]] ^= 1
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match[1]) if match and not faults.without_ranges else 0
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.headers.get("If-Range") not in (None, tag):
            start = 0
        self.send_response(206 if start else 200)
        if start:
            first = start + 1 if faults.wrong_start else start
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body:
            self._send(name, memoryview(data)[start:])

    def _send(self, name: str, data: memoryview) -> None:
        faults = self.server.faults
        with self.server.guard:
            cut = faults.cuts[name] > 0
            faults.cuts[name] -= cut
        if cut:
            data = data[: faults.cut_after]
        while data:
            piece, data = data[: 1 << 16], data[1 << 16 :]
            with self.server.guard:  # before it can have arrived
                self.server.sent += len(piece) * (name != "SHA256SUMS")
            self.wfile.write(piece)
            self.server.bucket.take(len(piece), threading.Event())
            if faults.slow:
                threading.Event().wait(faults.slow)
        if cut:
            self.close_connection = True


def main() -> None:
    """`python -m tests.weights.server FOLDER CERTIFICATE ADDRESS LOG RATE`: serve until standard input ends.

    The log has a line a request: the client's address, method and path. The port goes to standard output.
    """
    folder, certificate, address, log, rate = sys.argv[1:]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    handler = _Handler

    def note(self: _Handler, code: object = "-", size: object = "-") -> None:
        with Path(log).open("a") as file:
            file.write(f"{self.client_address[0]} {self.command} {self.path} {code}\n")

    handler.log_request = note  # type: ignore[method-assign, assignment]
    with Publisher(Path(folder), context=context, address=address) as server:
        server.bucket = Bucket(int(rate) or None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
