"""The control machine's end of a host's agent."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import paramiko

from toolkit.build import bootstrap, package
from toolkit.errors import ToolkitError, UnreachableError
from toolkit.inventory.commands import telling, told
from toolkit.inventory.host import Host
from toolkit.layout import PYTHON, TOOL
from toolkit.remote.options import become_root, ssh_options
from toolkit.remote.protocol import BEAT, MAX_LINE, MODULES, error_from_json
from toolkit.remote.ssh import SILENCE, connect, lost

_STDERR_KEPT = 2000
_PIECE = 1 << 16

Tell = Callable[[dict[str, Any]], None]


class Stream(Protocol):
    """Both directions of a program that runs on a host."""

    def write(self, data: bytes) -> None:
        """Write all of it."""

    def read(self, timeout: float) -> bytes:
        """What has come, at least one byte; b"" at the end.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """

    def complaint(self) -> str:
        """What the program wrote to standard error, its end."""


class Agent:
    """A running agent.

    Attributes:
        host: its host.
        name: name of its host.
        key: fingerprint of the key that logged in, "" on this machine.
    """

    def __init__(self, host: Host, stream: Stream, key: str) -> None:
        self.host, self.name = host, host.name
        self.key = key
        self._stream = stream
        self._writing = threading.Lock()
        self._read = bytearray()

    def call(self, operation: str, args: dict[str, Any], tell: Tell | None = None) -> Any:
        """Run an operation of `toolkit.hostside.operations`.

        Args:
            operation: its name.
            args: its arguments, JSON-safe.
            tell: called with each message on the way.

        Raises:
            UnreachableError: the connection broke or the host fell silent.
            ToolkitError: what the operation raised, with the host's name, and a next step for this machine.
        """
        self.send({"op": operation, "args": args})
        while True:
            message = self.receive()
            if "result" in message:
                return told(message["result"], self.host)
            if "error" in message:
                with telling(self.host):
                    raise error_from_json(message["error"], self.name)
            if tell is not None and "beat" not in message:
                tell(message)

    def send(self, value: dict[str, Any]) -> None:
        """Write one JSON line."""
        self.write(json.dumps(value).encode() + b"\n")

    def write(self, data: bytes) -> None:
        """Write bytes."""
        try:
            with self._writing:
                self._stream.write(data)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._ended() from error

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Let the other side know during the body that this one is there, whatever it does."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT):
                # Whoever reads or writes meets a broken connection, too.
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException), self._writing:
                    self._stream.write(b'{"beat": 1}\n')

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(BEAT)

    def receive(self) -> dict[str, Any]:
        """The next JSON line."""
        while (end := self._read.find(b"\n")) < 0:
            try:
                piece = self._stream.read(SILENCE)
            except TimeoutError as error:
                raise lost(self.name, f"it was silent for {SILENCE:.0f} s") from error
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise lost(self.name, error) from error
            if not piece:
                raise self._ended()
            self._read += piece
            if len(self._read) > MAX_LINE:
                raise ToolkitError(f"{self.name}: its agent sends no end of a line")
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        try:
            value = json.loads(line)
        except ValueError as error:
            shown = line[:200].decode("utf-8", "replace")
            raise ToolkitError(f"{self.name}: instead of the agent: {shown}") from error
        if not isinstance(value, dict):
            raise ToolkitError(f"{self.name}: its agent sent no object")
        return value

    def _ended(self) -> ToolkitError:
        said = self._stream.complaint().strip()
        if "a password is required" in said or "a terminal is required" in said or "must have a tty" in said:
            return UnreachableError(
                f"{self.name}: sudo asks for a password or a terminal: {said.splitlines()[-1]}",
                hint="give the user sudo rights with NOPASSWD, and no requiretty, in /etc/sudoers.d",
            )
        if "not in the sudoers" in said or "not allowed" in said:
            return UnreachableError(f"{self.name}: {said.splitlines()[-1]}", hint="give the user sudo rights")
        return lost(self.name, said[-_STDERR_KEPT:] or "the agent ended")


@contextmanager
def agent_on(host: Host, *, python: str | None = None) -> Iterator[Agent]:
    """The agent of a host for the body.

    Args:
        host: the host.
        python: interpreter on the host that has the toolkit's libraries; None: the one of the last deploy.

    Raises:
        ConfigError: the inventory cannot be followed.
        UnreachableError: the host cannot be reached or logged in to.
        NotReadyError: the host's interpreter lacks what the agent needs.
    """
    if host.local:
        with _here("toolkit.hostside") as stream, (agent := Agent(host, stream, "")).beating():
            yield agent
        return
    with _bootstrapped(host) as agent:
        _settle(agent, python)
        with agent.beating():
            yield agent


def run_module(
    host: Host, module: Sequence[str], tell: Tell, request: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a module of the toolkit on a host, as root, under its own Python, with nothing installed.

    Args:
        host: the host.
        module: name of the module, and its arguments; it writes one JSON object a line.
        tell: called with `{"connected": ...}` once the host is reached, then with each object but the last.
        request: what the module reads from its standard input, one JSON line; None: nothing.

    Returns:
        The last object.

    Raises:
        UnreachableError: the host cannot be reached, or the connection broke.
        ToolkitError: the module failed: the error that it wrote.
    """
    with module_on(host, module) as agent:
        tell({"connected": host.name})
        if request is not None:
            agent.send(request)
        while True:
            message = agent.receive()
            if "error" in message:
                with telling(host):
                    raise error_from_json({**message, "message": message["error"]}, host.name)
            if "changed" in message:
                return dict(told(message, host))
            tell(message)


@contextmanager
def module_on(host: Host, module: Sequence[str]) -> Iterator[Agent]:
    """A module of the toolkit that runs on a host for the body, which talks with it; it ends with its input.

    Args:
        host: the host; on this machine the module runs under this interpreter and as this user.
        module: name of the module, and its arguments.

    Raises:
        UnreachableError: the host cannot be reached or logged in to.
        ToolkitError: the toolkit cannot be put there.
    """
    if host.local:
        with _here(*module) as stream:
            yield Agent(host, stream, "")
        return
    with _bootstrapped(host) as agent:
        _settle(agent, None, run=module)
        yield agent


@contextmanager
def _bootstrapped(host: Host) -> Iterator[Agent]:
    """A connection on which the bootstrap runs."""
    with telling(host), connect(ssh_options(host)) as session:
        first = str(host.variables.get("ansible_python_interpreter") or PYTHON)
        text = Path(bootstrap.__file__).read_text(encoding="utf-8")
        words = [*become_root(session.options.user), first, "-I", "-S", "-c", text]
        yield Agent(host, _Channel(session.open(words)), session.key)


class NotReadyError(ToolkitError):
    """The host has no interpreter that the agent could run under.

    Attributes:
        begun: whether a deploy was begun there, which has not come to one yet.
    """

    begun = False


def _settle(agent: Agent, python: str | None, run: Sequence[str] | None = None) -> None:
    """Bring the agent or another module up, and the package to the host when it is not there yet."""
    wanted = {"root": TOOL, "digest": package.digest(), "python": python, "modules": list(MODULES)}
    agent.send(wanted if run is None else {**wanted, "run": list(run)})
    answer = agent.receive()
    if answer.get("need"):
        data = package.archive()
        agent.write(f"{len(data)}\n".encode() + data)
        answer = agent.receive()
    if "failed" in answer:
        raise ToolkitError(
            f"{agent.name}: the toolkit cannot be put there: {answer['failed']}",
            hint=f"free some space below {TOOL} and run the same command again",
        )
    if not answer.get("ready"):
        raise _not_ready(agent.name, answer, named=python is not None)


def _not_ready(name: str, answer: dict[str, Any], *, named: bool) -> NotReadyError:
    """Why no agent can run there: the profile's interpreter will not do, or there is none of a deploy yet."""
    absent = answer.get("absent")
    lacks = "does not run" if absent is None else f"lacks {', '.join(absent)}"
    why = f"{answer.get('python')} {lacks}"
    if named:
        hint = "set host.python in the profile to an interpreter there that has ddtoolkit[engine]"
        return NotReadyError(f"{name}: {why}", hint=hint)
    if answer.get("begun"):
        said, goes = "a deploy was begun there, and has not finished provisioning", "goes on with it"
        takes = f"; ddtoolkit uninstall NAME --purge -i INVENTORY --limit {name} takes it back"
    else:
        said, goes, takes = "nothing of ddtoolkit is there yet", "makes it ready", ""
    hint = f"ddtoolkit deploy profile NAME -i INVENTORY --limit {name} {goes}{takes}"
    error = NotReadyError(f"{name}: {said} ({why})", hint=hint)
    error.begun = bool(answer.get("begun"))
    return error


class _Channel:
    """An SSH channel as a stream."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._errors = bytearray()

    def write(self, data: bytes) -> None:
        left, end = memoryview(data), time.monotonic() + SILENCE
        while left:
            try:
                count = self._channel.send(bytes(left[:_PIECE]))
            except TimeoutError:  # of one wait, which `read` set; the host may only be slow
                if time.monotonic() > end:
                    raise
                continue
            if not count:
                raise EOFError("the connection was closed")
            left, end = left[count:], time.monotonic() + SILENCE

    def read(self, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        while True:
            if self._channel.recv_stderr_ready():
                self._errors += self._channel.recv_stderr(1 << 16)
            self._channel.settimeout(min(BEAT, max(end - time.monotonic(), 0.01)))
            try:
                return self._channel.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise

    def complaint(self) -> str:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.settimeout(1.0)
            while piece := self._channel.recv_stderr(1 << 16):
                self._errors += piece
        return self._errors[-_STDERR_KEPT:].decode("utf-8", "replace")


class _Pipes:
    """A child's pipes as a stream."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        # Both pipes are there: Popen was told so.
        assert child.stdin is not None  # noqa: S101
        assert child.stdout is not None  # noqa: S101
        self._in, self._out = child.stdin, child.stdout

    def write(self, data: bytes) -> None:
        self._in.write(data)
        self._in.flush()

    def read(self, timeout: float) -> bytes:
        if not select.select([self._out], [], [], timeout)[0]:
            raise TimeoutError
        return os.read(self._out.fileno(), 1 << 16)

    def complaint(self) -> str:
        return ""


@contextmanager
def _here(*module: str) -> Iterator[_Pipes]:
    """A module on this machine (`ansible_connection: local`), under this interpreter and as this user."""
    command = [sys.executable, "-P", "-m", *module]
    environment = os.environ | {"PYTHONPATH": str(Path(bootstrap.__file__).parents[2])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
    ) as child:
        yield _Pipes(child)
        if child.stdin is not None:
            child.stdin.close()
