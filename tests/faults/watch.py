"""Looks at a test host from outside, without its network and without disturbing what it does."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.machines import Host

_CLONE_NEWNET = 0x40000000
_PAUSE = 0.04
_PATIENCE = 2.0


def token(port: int, key: str) -> str | None:
    """The text of one generated token at 127.0.0.1:`port` in this thread's network; None: there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/generate", json.dumps(body), headers)
        response = connection.getresponse()
        value = json.loads(response.read())
        return str(value["text"]) if response.status == http.client.OK and value["output_ids"] else None
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None
    finally:
        connection.close()


def enter_network(pid: int) -> None:
    """Move this thread into the network namespace of a process.

    Raises:
        OSError: the process is gone.
    """
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)


@dataclass
class Watch:
    """Asks a host's server for a token again and again, in a thread, through reboots.

    Attributes:
        seen: seconds since the start and the text of the token, None without one; changes only.
    """

    host: Host
    port: int
    key: str
    seen: list[tuple[float, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        entered = None
        while not self._ended.wait(_PAUSE):
            try:
                leader = self.host.leader()
                if leader != entered:
                    enter_network(leader)
                    entered = leader
                text = token(self.port, self.key)
            except (OSError, RuntimeError):
                text = None
            if not self.seen or self.seen[-1][1] != text:
                self.seen.append((time.monotonic() - self._begin, text))

    def now(self) -> str | None:
        """The text of the last token; None when there was none the last time."""
        return self.seen[-1][1] if self.seen else None

    def stop(self) -> None:
        """End the watching."""
        self._ended.set()
        self._thread.join()

    def without_tokens(self) -> float:
        """Seconds without a token in all, to the last one that came."""
        total, down = 0.0, None
        for when, text in self.seen:
            if text is None and down is None:
                down = when
            elif text is not None and down is not None:
                total, down = total + when - down, None
        return round(total, 2)

    def serving_since(self) -> float | None:
        """Seconds from the start until tokens came for good; 0.0: they never stopped; None: none come."""
        if self.now() is None:
            return None
        gaps = [when for (when, text), (_, before) in zip(self.seen[1:], self.seen, strict=False)
                if text is not None and before is None]  # fmt: skip
        return round(gaps[-1], 2) if gaps else 0.0


def busy(host: Host) -> list[str]:
    """What of the toolkit is at work on the host besides the server: agents, transactions, recoveries."""
    found = []
    for folder, _, _ in os.walk(host.payload()):  # what is gone by now is left out
        procs = Path(folder) / "cgroup.procs"
        unit = procs.parent.name
        if unit.startswith("ddtoolkit-") and ("-transaction" in unit or unit.startswith("ddtoolkit-recover")):
            found += [unit] * bool(_read(procs).strip())
        elif not unit.startswith("ddtoolkit-"):
            found += [f"agent {pid}" for pid in _read(procs).split() if _agent(pid)]
    return found


def _agent(pid: str) -> bool:
    line = _read(Path(f"/proc/{pid}/cmdline"))
    return "toolkit.hostside" in line or "/toolkit/remote/" in line or "MARKER = " in line


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
