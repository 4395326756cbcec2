"""HTTP as transfers need it: ranges, honest redirects, credentials for one host only."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.request
from collections.abc import Mapping
from email.message import Message
from http import HTTPStatus
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from toolkit import __version__
from toolkit.deadline import Deadline, look_up
from toolkit.errors import ToolkitError
from toolkit.profile.source import trustworthy

SILENCE = 60.0
_MOST = 64 << 20  # bytes of a listing
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_UNREACHED = (
    "correct the address; where this host does not reach it, name a folder on the host, or a peer that has "
    "the checkpoint (peer://HOST/NAME@REVISION, deploy --seed HOST)"
)
_FINAL = {
    HTTPStatus.UNAUTHORIZED: "asks for a token",
    HTTPStatus.FORBIDDEN: "refuses it",
    HTTPStatus.NOT_FOUND: "does not have it",
    HTTPStatus.GONE: "has it no more",
}
# What reading a response can raise when the connection breaks or falls silent.
BROKEN = (OSError, http.client.HTTPException)


class RefusedError(ToolkitError):
    """The server answered, and trying again would not help."""


class BusyError(OSError):
    """The server asks to be tried again later.

    Attributes:
        after: seconds to wait; None where it does not say.
    """

    def __init__(self, message: str, after: float | None) -> None:
        super().__init__(message)
        self.after = after


class Web:
    """Requests to one server, and to where it redirects.

    Args:
        token: bearer token for that server (RFC 6750); never sent to another host.
        certificate: PEM certificate that alone is trusted; None: those that this machine trusts.
        silence: seconds without a byte after which a connection counts as broken; an answer has to begin
            within them, whatever comes before it.
    """

    def __init__(
        self, *, token: str | None = None, certificate: str | None = None, silence: float = SILENCE
    ) -> None:
        self._token = token
        self._silence = silence
        handlers: list[urllib.request.BaseHandler] = [_Redirects(), _Http()]
        context = None
        if certificate is not None:
            context = ssl.create_default_context(cadata=certificate)
            context.check_hostname = False  # the certificate is this one server's, whatever its address
            handlers.append(urllib.request.ProxyHandler({}))
        handlers.append(_Https(context))
        self._opener = urllib.request.build_opener(*handlers)

    def open(
        self, url: str, *, method: str = "GET", start: int = 0, validator: str | None = None
    ) -> http.client.HTTPResponse:
        """A response with status 200 or 206.

        Args:
            url: what to ask for.
            method: GET, HEAD or DELETE.
            start: first byte that is wanted.
            validator: entity tag of which the bytes have to be a part; else all of them come.

        Raises:
            RefusedError: the server does not have it, or not for us.
            BusyError: it asks to be tried again.
            OSError: it cannot be reached.
        """
        if not trustworthy(url):
            raise RefusedError(f"{url} is neither HTTPS nor on this machine")
        request = urllib.request.Request(url, method=method)  # noqa: S310  checked above
        request.add_header("User-Agent", f"ddtoolkit/{__version__}")
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        if start:
            request.add_header("Range", f"bytes={start}-")
            if validator is not None:
                request.add_header("If-Range", validator)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._silence)
        except HTTPError as error:
            with error:
                raise _failure(url, error) from None
        except ValueError as error:  # what a server sent is no URL, no header, no status
            raise RefusedError(f"{url}: {error}") from None
        return response

    def read(self, url: str) -> bytes:
        """A small document.

        Raises:
            ToolkitError: it cannot be had.
        """
        try:
            with self.open(url) as response:
                data = response.read(_MOST + 1)
        except BROKEN as error:
            raise ToolkitError(f"{url}: {reason(error)}", hint=_UNREACHED) from None
        if len(data) > _MOST:
            raise ToolkitError(f"{url} is larger than {_MOST >> 20} MiB: that is no listing")
        return data

    def json(self, url: str) -> Any:
        """A small JSON document.

        Raises:
            ToolkitError: it cannot be had, or is no JSON.
        """
        try:
            return json.loads(self.read(url))
        except ValueError:
            raise ToolkitError(f"{url} is no JSON: is it the address of a model hub?") from None


def first_byte(response: http.client.HTTPResponse) -> int:
    """Position of the first byte that a response brings: 0 where the server sends all of it."""
    if response.status != HTTPStatus.PARTIAL_CONTENT:
        return 0
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        raise http.client.HTTPException("a partial answer without its range")
    return int(match[1])


def strong_tag(headers: Message) -> str | None:
    """The entity tag, where it stands for the very bytes."""
    tag = headers.get("ETag")
    return tag if isinstance(tag, str) and tag.startswith('"') else None


def reason(error: BaseException) -> str:
    """Why a connection failed, without Python's wrapping."""
    inner = getattr(error, "reason", None)
    if isinstance(inner, BaseException):
        return reason(inner)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "it fell silent"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _failure(url: str, error: HTTPError) -> Exception:
    said = f"{url}: HTTP {error.code} {error.reason}"
    if error.code in _FINAL:
        hint = None
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            hint = "a gated repository needs a token: HF_TOKEN, or root's ~/.cache/huggingface/token"
        return RefusedError(f"{said}: the server {_FINAL[HTTPStatus(error.code)]}", hint=hint)
    if error.code in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT) or error.code >= 500:
        after = error.headers.get("Retry-After", "") if error.headers else ""
        return BusyError(said, float(after) if after.isdecimal() else None)
    return RefusedError(said)


class _Begins(http.client.HTTPConnection):
    """A connection whose answers begin in time: informational ones (RFC 9110, section 15.2) are no answer."""

    def connect(self) -> None:
        """As the base does.

        Raises:
            OSError: the host's name was not looked up within the connection's timeout.
        """
        try:
            look_up(self.host, self.timeout or SILENCE)
        except TimeoutError as error:
            raise OSError(str(error)) from None  # it is not the server that is silent
        super().connect()

    def getresponse(self) -> http.client.HTTPResponse:
        """As the base does.

        Raises:
            OSError: status and headers did not come within the connection's timeout.
        """
        limit = self.timeout or SILENCE
        with Deadline(limit) as deadline:
            if self.sock is not None:
                deadline.watch(self.sock)
            try:
                response = super().getresponse()
            except BROKEN:
                if not deadline.over:
                    raise
        if deadline.over:  # which also looks like the end of the headers
            raise OSError(f"no answer began within {limit:g} s")
        return response


class _BeginsSecurely(_Begins, http.client.HTTPSConnection):
    """The same over TLS."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Begins, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, trusted: ssl.SSLContext | None) -> None:
        super().__init__()
        self._trusted = trusted

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_BeginsSecurely, req, context=self._trusted)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never out of TLS, and with credentials only on the same host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not trustworthy(newurl):
            fp.close()
            raise RefusedError(f"{req.full_url} redirects to {newurl}, which is not HTTPS")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        known: Mapping[str, str] = req.unredirected_hdrs
        if new is not None and "Authorization" in known and _origin(newurl) == _origin(req.full_url):
            new.add_unredirected_header("Authorization", known["Authorization"])
        return new


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
