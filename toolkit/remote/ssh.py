"""One SSH session over paramiko: connect, log in, run a program, hold the line.

A host that falls silent is given up after `SILENCE` seconds: TCP itself would wait for a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import paramiko
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import IncompatiblePeer

from toolkit.deadline import look_up
from toolkit.errors import ToolkitError, UnreachableError
from toolkit.remote import keys
from toolkit.remote.options import SshOptions

# What goes wrong is raised and told once; the library would also print tracebacks of its own.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)
CONNECT_LIMIT = 15.0
SILENCE = 30.0
_KEEPALIVE = 10


@dataclass(frozen=True, slots=True)
class Session:
    """A logged-in session.

    Attributes:
        options: how it was reached.
        transport: paramiko's connection.
        key: fingerprint of the key that logged in.
    """

    options: SshOptions
    transport: paramiko.Transport
    key: str

    def open(self, argv: Sequence[str]) -> paramiko.Channel:
        """Start a program; its standard streams are the channel's.

        Args:
            argv: program and arguments; each arrives as one word, whatever it holds.

        Raises:
            UnreachableError: the connection is lost.
        """
        try:
            channel = self.transport.open_session(timeout=CONNECT_LIMIT)
            channel.settimeout(SILENCE)
            channel.exec_command(shlex.join(argv))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise lost(self.options.name, error) from error
        return channel


def lost(name: str, error: BaseException | str) -> UnreachableError:
    """The error of a connection that broke."""
    reason = str(error) or type(error).__name__
    said = f"{name}: the SSH connection was lost: {reason}"
    return UnreachableError(said, hint="run the same command again")


@contextmanager
def connect(options: SshOptions) -> Iterator[Session]:
    """Log in to a host for the body, through its jump hosts.

    Raises:
        UnreachableError: it cannot be reached, its key is not the known one, or it refuses the login.
    """
    with contextlib.ExitStack() as stack:
        via: paramiko.Transport | None = None
        for hop in (*options.jumps, options):
            via, key = _log_in(hop, stack, via)
        if via is None:
            raise ToolkitError(f"{options.name}: no way to it")
        yield Session(options, via, key)


def offered_key(options: SshOptions) -> bytes:
    """The ed25519 key that a host offers, without logging in to it; its jump hosts are logged in to.

    Raises:
        UnreachableError: it cannot be reached.
    """
    with contextlib.ExitStack() as stack:
        via: paramiko.Transport | None = None
        for hop in options.jumps:
            via, _ = _log_in(hop, stack, via)
        return _start(options, stack, via)[1]


def _log_in(
    options: SshOptions, stack: contextlib.ExitStack, via: paramiko.Transport | None
) -> tuple[paramiko.Transport, str]:
    transport, offered = _start(options, stack, via)
    keys.check(options.name, options.known_as, options.known_hosts, offered)
    return transport, _authenticate(transport, options)


def _start(
    options: SshOptions, stack: contextlib.ExitStack, via: paramiko.Transport | None
) -> tuple[paramiko.Transport, bytes]:
    """A transport up to the key exchange, and the key that the host offers."""
    where = f"{options.hostname} port {options.port}"
    try:
        stream = _stream(options, stack, via)
        transport = paramiko.Transport(stream)
        stack.callback(transport.close)
        transport.banner_timeout = CONNECT_LIMIT
        transport.auth_timeout = CONNECT_LIMIT
        transport.get_security_options().key_types = (keys.KEY_TYPE,)
        transport.start_client(timeout=CONNECT_LIMIT)
        # A host that is silent lets the call above return without an error; this one notices.
        offered = transport.get_remote_server_key().asbytes()
    except IncompatiblePeer as error:
        raise UnreachableError(
            f"{options.name}: {where} has no {keys.KEY_TYPE} host key, or nothing else in common: {error}",
            hint="make one on the host: ssh-keygen -A",
        ) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreachableError(
            f"{options.name}: no SSH at {where}: {reason}",
            hint=f"check the address, and that sshd runs there: ssh -v {options.hostname}",
        ) from error
    transport.set_keepalive(_KEEPALIVE)
    return transport, offered


def _stream(
    options: SshOptions, stack: contextlib.ExitStack, via: paramiko.Transport | None
) -> socket.socket | paramiko.Channel:
    if via is not None:
        target = (options.hostname, options.port)
        return via.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=CONNECT_LIMIT)
    if options.proxy_command is not None:
        return _through(_expand(options.proxy_command, options), stack)
    look_up(options.hostname, CONNECT_LIMIT)
    made = socket.create_connection((options.hostname, options.port), timeout=CONNECT_LIMIT)
    stack.callback(made.close)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
    return made


def _through(command: str, stack: contextlib.ExitStack) -> socket.socket:
    """Both ends of a ProxyCommand's standard streams as one socket (ssh_config(5): run by the shell)."""
    ours, theirs = socket.socketpair()
    stack.callback(ours.close)
    with theirs:
        end = theirs.fileno()
        child = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdin=end, stdout=end)
    stack.callback(child.wait)
    stack.callback(child.terminate)
    return ours


def _expand(command: str, options: SshOptions) -> str:
    tokens = {"%%": "%", "%h": options.hostname, "%p": str(options.port), "%r": options.user}
    tokens["%n"] = options.hostname
    parts = []
    position = 0
    while position < len(command):
        pair = command[position : position + 2]
        parts.append(tokens.get(pair, pair[0]))
        position += 2 if pair in tokens else 1
    return "".join(parts)


def _authenticate(transport: paramiko.Transport, options: SshOptions) -> str:
    """Log in with the first key that is accepted; its fingerprint."""
    refused: list[str] = []
    for describe, load in _candidates(options):
        try:
            key = load()
        except (paramiko.SSHException, OSError, ValueError, TypeError) as error:
            refused.append(f"{describe}: {error or type(error).__name__}")
            continue
        try:
            transport.auth_publickey(options.user, key)
        except paramiko.AuthenticationException:
            refused.append(f"{describe}: refused")
            continue
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise lost(options.name, error) from error
        return keys.fingerprint(key.asbytes())
    tried = "; ".join(refused) or "there is no key to try"
    raise UnreachableError(
        f"{options.name}: {options.user}@{options.hostname} port {options.port} refuses the login ({tried})",
        hint="set ansible_ssh_private_key_file, or add the key to the agent with ssh-add",
    )


def _candidates(options: SshOptions) -> Iterator[tuple[str, Callable[[], paramiko.PKey]]]:
    for path in options.identity_files:
        if path.is_file():
            yield str(path), partial(_load, path)
    if options.use_agent:
        for key in paramiko.Agent().get_keys():
            yield f"agent key {keys.fingerprint(key.asbytes())}", partial(_same, key)


def _same(key: paramiko.PKey) -> paramiko.PKey:
    return key


def _load(path: Path) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):  # the second is cryptography's
        raise ValueError(f"is encrypted; unlock it with: ssh-add {path}") from None
    except UnknownKeyType as error:
        raise ValueError(f"paramiko cannot use this kind of key: {error}") from None
