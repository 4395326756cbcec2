"""The agents of the hosts that one command works on, opened side by side and kept to its end."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from toolkit.errors import ToolkitError, UnreachableError
from toolkit.inventory.commands import command
from toolkit.inventory.host import Host
from toolkit.remote.absence import Absence
from toolkit.remote.agent import Agent, Tell, agent_on


class Connections:
    """Agents by host; a context manager that closes them.

    Args:
        hosts: the hosts.
        python: interpreter there that has the toolkit's libraries; None: the one of the last deploy.
    """

    def __init__(self, hosts: Sequence[Host], *, python: str | None = None) -> None:
        self.hosts = {host.name: host for host in hosts}
        self._python = python
        self._agents: dict[str, Agent] = {}
        self._before: dict[str, str | None] = {}  # the last transaction when the host was locked
        self._stack = contextlib.ExitStack()
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def open(self, name: str) -> None:
        """Connect to a host, where that was not done yet.

        Raises:
            ToolkitError: the host cannot be reached, or has no interpreter for the agent.
        """
        self._agent(name)

    def settle(self, name: str, python: str) -> None:
        """Connect to a host's agent under another interpreter than the last deploy's.

        Raises:
            ToolkitError: the host cannot be reached, or the interpreter lacks what the agent needs.
        """
        with self._guard:
            self._agents.pop(name, None)
        self._connect(name, python)

    def call(self, name: str, operation: str, args: dict[str, Any], tell: Tell | None = None) -> Any:
        """Run an operation on a host, connecting first where that was not done yet.

        Raises:
            ToolkitError: the host cannot be reached, or what the operation raised.
        """
        agent = self._agent(name)
        return agent.call(operation, {**args, "who": _who(agent.key)}, tell)

    def change(self, name: str, operation: str, args: dict[str, Any], tell: Tell) -> Any:
        """Run an operation that ends in a transaction, and go on watching it where the connection breaks.

        Raises:
            UnreachableError: the host did not come back in time; its transaction goes on without us.
            ToolkitError: what the operation raised.
        """
        last: dict[str, Any] | None = None

        def watch(message: dict[str, Any]) -> None:
            nonlocal last
            last = message.get("event", last)
            tell(message)

        try:
            return self.call(name, operation, args, watch)
        except UnreachableError as error:
            if operation == "uninstall":  # what its stop came to is not what it came to
                raise _removing(args["service"], error) from error
            if last is None and name not in self._before:
                raise
            tell({"step": ["reconnect", error.message]})
            return self._resume(name, args["service"], error, watch, lambda: last)

    def serves(self, name: str, service: str) -> bool:
        """Whether the service answers on a host; False also where the host cannot be asked."""
        with contextlib.suppress(ToolkitError):
            return bool(self.call(name, "status", {"service": service})[0]["healthy"])
        return False

    def reserve(
        self,
        name: str,
        service: str,
        command: str,
        *,
        wait: float,
        tell: Tell | None = None,
        profile: dict[str, Any] | None = None,
        stopping: bool = False,
    ) -> None:
        """Take the service's lock on a host, until its agent ends.

        Args:
            name: the host.
            service: name of the service.
            command: what is done, shown to whoever finds it locked.
            wait: seconds to wait for another holder.
            tell: hears who is waited for.
            profile: what is to be deployed: nobody else deploys it for the first time meanwhile.
            stopping: the service is to be stopped: what was interrupted is ended without starting anything.

        Raises:
            LockedError: someone else holds it.
        """
        args = {"service": service, "command": command, "lock_wait": wait, "profile": profile}
        args |= {"stopping": stopping}
        self._before[name] = self.call(name, "reserve", args, tell)["transaction"]

    def _resume(
        self,
        name: str,
        service: str,
        error: UnreachableError,
        tell: Tell,
        last: Callable[[], dict[str, Any] | None],
    ) -> Any:
        away, hint = Absence(), command([self.hosts[name]], f"status {service}")

        def heard(message: dict[str, Any]) -> None:
            away.end()
            tell(message)

        while True:
            goes_on = "goes on" if last() else "may have been begun, and goes on then,"
            away.wait(error, f"the change {goes_on} on the host by itself", tell, hint)
            with self._guard:
                self._agents.pop(name, None)
            args = {"service": service, "last": last()}
            if last() is None:
                args["after"] = self._before[name]
            try:
                return self.call(name, "follow", args, heard)
            except UnreachableError as again:
                error = again

    def _agent(self, name: str) -> Agent:
        with self._guard:
            agent = self._agents.get(name)
        return self._connect(name, self._python) if agent is None else agent

    def _connect(self, name: str, python: str | None) -> Agent:
        manager = agent_on(self.hosts[name], python=python)
        agent = manager.__enter__()
        with self._guard:
            self._stack.push(manager)
            self._agents[name] = agent
        return agent


def _removing(service: str, error: UnreachableError) -> UnreachableError:
    """A removal whose end is not known here; a host that is up brings it to its end."""
    said = f"{error.message}; what had begun of the removal of {service} goes on there by itself"
    return UnreachableError(said, hint="the same command again tells what came of it, and does what is left")


def _who(key: str) -> str:
    """Who works from here, for lock and history: user, machine, and the key that logged in."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    who = f"{user}@{socket.gethostname()}"
    return f"{who} with key {key}" if key else who
