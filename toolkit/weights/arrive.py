"""One file on its way: read by ranges, hashed while it is written, gone on with where it broke."""

from __future__ import annotations

import hashlib
import http.client
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.weights.listing import File
from toolkit.weights.pace import Bucket, Meter
from toolkit.weights.reserve import reserve
from toolkit.weights.web import BROKEN, BusyError, RefusedError, Web, first_byte, reason, strong_tag

_READ = 1 << 22


class StoppedError(ToolkitError):
    """Another file failed, so this one was left where it was."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When to give up.

    Attributes:
        attempts: connections in a row that bring not one byte.
        pause: seconds before the second attempt; doubled for each further one.
        longest: most seconds between two attempts.
    """

    attempts: int = 10
    pause: float = 1.0
    longest: float = 60.0

    def wait(self, failed: int) -> float:
        """Seconds to wait after so many attempts in vain."""
        return min(self.pause * 2.0 ** max(failed - 1, 0), self.longest)


@dataclass(frozen=True, slots=True)
class Means:
    """What all files of one transfer share.

    Attributes:
        web: requests to the source.
        bucket: limits the rate.
        meter: counts what comes.
        say: told of breaks.
        patience: when to give up.
        stop: set once the transfer has failed.
    """

    web: Web
    bucket: Bucket
    meter: Meter
    say: Callable[[str], None]
    patience: Patience = Patience()
    stop: threading.Event = field(default_factory=threading.Event)


class Arrival:
    """One file of a checkpoint.

    Args:
        path: where it is written.
        file: what is wanted.
        means: what it is fetched with.
    """

    def __init__(self, path: Path, file: File, means: Means) -> None:
        self._path = path
        self._file = file
        self._means = means
        self._have = 0
        self._begin()

    def run(self) -> str:
        """Have it complete and on the disk; its SHA-256.

        Raises:
            ToolkitError: the source does not have it, cannot be reached for long, or has other content than
                it lists. What has come stays, unless it was found to be wrong.
            StoppedError: another file failed.
            OSError: the disk is full.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._path, flags, 0o644), "r+b", buffering=0) as out:
            fd = out.fileno()
            self._resume(fd)
            if self._wrong() is not None and self._have == self._file.size:
                self._again(fd)
            for last in (False, True):
                self._fetch(fd)
                why = self._wrong()
                if why is None:
                    break
                self._again(fd)
                if last:
                    raise ToolkitError(
                        f"{self._file.url}: {why}; it came twice and is not kept",
                        hint="the source's copy or its listing is damaged; what else has come is kept",
                    )
                self._means.say(f"{self._file.path}: {why}; it is fetched once more")
            os.fchmod(fd, 0o644)
            os.fsync(fd)
        return self._sha256.hexdigest()

    def _begin(self) -> None:
        self._sha256 = hashlib.sha256()
        # Git's own name of a small file is the one hash of it that the hub publishes; no protection is meant.
        self._git = hashlib.sha1(f"blob {self._file.size}\0".encode(), usedforsecurity=False)

    def _take(self, data: memoryview | bytes) -> None:
        self._sha256.update(data)
        if self._file.git is not None:
            self._git.update(data)
        self._have += len(data)
        self._means.meter.add(len(data))

    def _resume(self, fd: int) -> None:
        """Hash what an earlier run has written."""
        size = os.fstat(fd).st_size
        if size > self._file.size:
            self._empty(fd)
            return
        while self._have < size:
            self._check_stop()
            data = os.pread(fd, _READ, self._have)
            if not data:
                break
            self._sha256.update(data)
            if self._file.git is not None:
                self._git.update(data)
            self._have += len(data)
            self._means.meter.have(len(data))

    def _again(self, fd: int) -> None:
        self._means.meter.add(-self._have)
        self._have = 0
        self._empty(fd)
        self._begin()

    def _empty(self, fd: int) -> None:
        """Begin anew, with the space reserved again, which goes with the bytes."""
        os.ftruncate(fd, 0)
        if self._file.size:
            reserve(fd, self._file.size, self._path)

    def _wrong(self) -> str | None:
        """How the complete file differs from what is listed; None where it does not."""
        wanted, found = self._file.sha256, self._sha256.hexdigest()
        if wanted is not None and found != wanted:
            return f"its SHA-256 is {found}, not {wanted} as listed"
        if self._file.git is not None and self._git.hexdigest() != self._file.git:
            return f"its git hash is {self._git.hexdigest()}, not {self._file.git} as listed"
        return None

    def _fetch(self, fd: int) -> None:
        """Read until it is complete, over as many connections as that takes."""
        failed = 0
        while self._have < self._file.size:
            self._check_stop()
            before, after = self._have, None
            try:
                self._read(fd)
                why = "the connection was closed before the end"
            except BusyError as error:
                why, after = str(error), error.after
            except BROKEN as error:
                if isinstance(error, _DiskError):
                    raise error.original from None
                why = reason(error)
            if self._have == self._file.size:
                return
            failed = 1 if self._have > before else failed + 1
            if failed >= self._means.patience.attempts:
                raise ToolkitError(
                    f"{self._file.url}: {why}; {failed} attempts brought nothing more",
                    hint="run the same command again: it goes on with what has come",
                )
            self._means.say(f"{self._file.path}: {why} at {self._have} of {self._file.size} bytes; going on")
            self._means.stop.wait(max(self._means.patience.wait(failed), after or 0.0))

    def _read(self, fd: int) -> None:
        """Read what one connection brings."""
        means, file = self._means, self._file
        with means.web.open(
            file.url, start=self._have, validator=None if file.sha256 else file.validator
        ) as response:
            tag = strong_tag(response.headers)
            if file.validator is not None and file.sha256 is None and tag not in (None, file.validator):
                raise RefusedError(
                    f"{file.url} has changed since it was listed",
                    hint="run the same command again once whoever publishes it is done",
                )
            start = first_byte(response)
            if start != self._have:
                if start != 0:
                    raise http.client.HTTPException(f"byte {start} came instead of byte {self._have}")
                if self._have:
                    means.say(f"{file.path}: the server sends it from its beginning")
                    self._again(fd)
            buffer = memoryview(bytearray(means.bucket.chunk))
            while self._have < file.size:
                self._check_stop()
                count = response.readinto(buffer[: file.size - self._have])
                if not count:
                    return
                _write(fd, buffer[:count], self._have, self._path)
                self._take(buffer[:count])
                means.bucket.take(count, means.stop)

    def _check_stop(self) -> None:
        if self._means.stop.is_set():
            raise StoppedError(f"{self._file.path}: stopped")


class _DiskError(OSError):
    """Writing failed; kept apart from a broken connection.

    Attributes:
        original: what was raised.
    """

    def __init__(self, original: OSError) -> None:
        super().__init__(str(original))
        self.original = original


def _write(fd: int, data: memoryview, position: int, path: Path) -> None:
    while data:
        try:
            count = os.pwrite(fd, data, position)
        except OSError as error:
            raise _DiskError(OSError(error.errno, error.strerror, str(path))) from None
        data, position = data[count:], position + count
