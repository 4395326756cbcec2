"""Running a measurement so that nothing of it can hang who waits for it.

It has a limit in all, and another one for its silence; then it is killed where it runs (`confine`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.doctor.load.confine import Way, confined
from toolkit.doctor.load_result import End, Left, Run

_FOLDER = Path(__file__).parent
_PACKAGE = "toolkit.doctor.load"
_POLL = 0.1
_KEPT = 8 << 20  # bytes of output; a measurement of 64 GPUs writes a fifth of it
_SAID = 800

Line = dict[str, Any]


def measure(task: str, request: Mapping[str, Any], way: Way) -> tuple[list[Line], Run]:
    """Run `copies` or `all_reduce`; what it wrote until its end, and how that came."""
    modules = {f"{_PACKAGE}.{name}": _text(name) for name in ("common", task)}
    data = json.dumps({**request, "limit": way.limit, "modules": modules}).encode() + b"\n"
    body = confined(way)
    try:
        child = body.start()
    except OSError as error:
        body.discard()
        return [], Run("unstarted", said=f"{error.filename or way.python}: {error.strerror}")
    reader = _Reader(child, data)
    try:
        end = reader.read(way.limit, way.silence)
    finally:
        left = body.end(child)
    return reader.lines, _run(end, reader, child.returncode, tuple(left))


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")


def _run(end: End | None, reader: _Reader, status: int | None, left: tuple[Left, ...]) -> Run:
    told = next((line["failed"] for line in reader.lines if isinstance(line.get("failed"), dict)), None)
    said = " ".join(reader.rest.decode("utf-8", "replace").split())[-_SAID:]
    if end is not None:
        return Run(end, reader.at, said, None, left)
    if told is not None:
        return Run("failed", reader.at, str(told.get("said")), status, left)
    if status == 0 and any(line.get("done") is True for line in reader.lines):
        return Run("done", "", "", status, left)
    return Run("ended", reader.at, said, status, left)


class _Reader:
    """Writes the request, and reads lines from a child until its end or until it took too long.

    Attributes:
        lines: the objects that it wrote.
        at: its last step.
        rest: the end of all else that it wrote, standard error included.
    """

    def __init__(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        self.lines: list[Line] = []
        self.at = ""
        self.rest = b""
        self._child, self._unsent, self._begun, self._total = child, data, bytearray(), 0

    def read(self, limit: float, silence: float) -> End | None:
        """Why it has to be killed; None where it ended by itself."""
        begin = heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            self._register(selector)
            while selector.get_map():
                for key, _ in selector.select(_POLL):
                    if self._ready(key.fileobj, selector):
                        heard = time.monotonic()
                now = time.monotonic()
                if self._total > _KEPT:
                    return "flooded"
                if now - begin > limit:
                    return "slow"
                if now - heard > silence:
                    return "silent"
                if self._child.poll() is not None and not selector.select(0):
                    break  # a grandchild may keep the pipes open
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(begin + limit - time.monotonic(), 0.0))
            return None
        return "slow"

    def _register(self, selector: selectors.BaseSelector) -> None:
        child = self._child
        for stream, event in (
            (child.stdin, selectors.EVENT_WRITE),
            (child.stdout, selectors.EVENT_READ),
            (child.stderr, selectors.EVENT_READ),
        ):
            assert stream is not None  # noqa: S101  Popen was told to make it
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, event)

    def _ready(self, stream: Any, selector: selectors.BaseSelector) -> bool:
        """Go on with one stream; whether it told something."""
        stdin = self._child.stdin
        if stdin is not None and stream is stdin:
            try:
                self._unsent = self._unsent[os.write(stdin.fileno(), self._unsent) :]
            except BrokenPipeError:  # it reads nothing, and will be told of by its end
                self._unsent = b""
            except BlockingIOError:
                return False
            if not self._unsent:
                selector.unregister(stdin)
                stdin.close()
            return False
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            selector.unregister(stream)
            return False
        self._total += len(data)
        if stream is self._child.stderr:
            self.rest = (self.rest + data)[-_SAID:]
            return False
        return self._take(data)

    def _take(self, data: bytes) -> bool:
        self._begun += data
        if b"\n" not in data:
            return False
        *whole, begun = bytes(self._begun).split(b"\n")
        self._begun = bytearray(begun)
        told = False
        for text in whole:
            line = _object(text)
            if line is None:
                self.rest = (self.rest + text + b"\n")[-_SAID:]
                continue
            told = True
            self.lines.append(line)
            self.at = str(line.get("at", self.at))
        return told


def _object(text: bytes) -> Line | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
