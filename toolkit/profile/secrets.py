"""Secrets, read where a profile refers to them and when they are needed.

The value is wrapped so that no `repr`, traceback or log shows it, and every error names the reference only.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import ConfigError, Problem
from toolkit.profile.schema import Profile, SecretRef

MAX_BYTES = 64 * 1024
SECRETS = ("api_key", "admin_api_key")  # keys of the profile's service section


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret's value; `reveal` is the only way to it.

    Attributes:
        reference: where it was read: `env NAME`, `file PATH`, or `command PROGRAM`.
        warnings: what is wrong with how it is kept, such as a file that others can read.
    """

    reference: str
    warnings: tuple[str, ...] = ()
    _value: str = field(default="", repr=False)

    def reveal(self) -> str:
        """The secret itself."""
        return self._value


def describe(reference: SecretRef) -> str:
    """The reference in words; a command's arguments are left out, they may hold more than they should."""
    if reference.env is not None:
        return f"env {reference.env}"
    if reference.file is not None:
        return f"file {reference.file}"
    return f"command {(reference.command or ('',))[0]}"


def resolve_secret(reference: SecretRef, *, timeout: float = 30.0) -> Secret:
    """Read the secret that `reference` names; one newline at its end is not part of it.

    Args:
        reference: where it is kept.
        timeout: seconds that a command may take.

    Raises:
        ConfigError: it cannot be read, others can write it, or it is empty, longer than 64 KiB, not UTF-8, or
            holds control characters. Names the reference, never the value.
    """
    name = describe(reference)
    warnings: tuple[str, ...] = ()
    if reference.env is not None:
        raw = _from_environment(reference.env, name)
    elif reference.file is not None:
        raw, warnings = _from_file(Path(reference.file).expanduser(), name)
    else:
        raw = _from_command(reference.command or (), name, timeout)
    return Secret(name, warnings, _text(raw, name))


def require_secrets(profile: Profile) -> None:
    """Make sure that every secret of the profile can be read now.

    Raises:
        ConfigError: each that cannot, with its key and the reason.
    """
    problems = []
    for name in SECRETS:
        reference: SecretRef | None = getattr(profile.service, name)
        if reference is None:
            continue
        try:
            resolve_secret(reference)
        except ConfigError as error:
            problems.append(Problem(error.message, key=f"service.{name}", hint=error.hint))
    if problems:
        raise ConfigError(problems)


def _from_environment(variable: str, name: str) -> bytes:
    value = os.environb.get(variable.encode())
    if value is None:
        raise ConfigError(f"secret {name}: the variable is not set", hint=f"export {variable}")
    return value


def _from_file(path: Path, name: str) -> tuple[bytes, tuple[str, ...]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            raw = _read(descriptor, None) if stat.S_ISREG(mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"secret {name}: cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"secret {name}: is no regular file")
    permissions = f"(mode {stat.S_IMODE(mode):04o})"
    if mode & 0o022:
        raise ConfigError(f"secret {name}: others can change it {permissions}", hint=f"chmod 600 {path}")
    if mode & 0o044:
        return raw, (f"secret {name}: others can read it {permissions}: chmod 600 {path}",)
    return raw, ()


def _from_command(command: tuple[str, ...], name: str, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"secret {name}: cannot be run: {_reason(error)}") from None
    with process:
        try:
            raw = _read(process.stdout.fileno() if process.stdout else -1, deadline)
            if len(raw) > MAX_BYTES:
                os.killpg(process.pid, signal.SIGKILL)
                return raw
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            raise ConfigError(f"secret {name}: no answer within {timeout:g} s") from None
    if status:
        hint = "run it by hand to see its message"
        raise ConfigError(f"secret {name}: ended with exit status {status}", hint=hint)
    return raw


def _read(descriptor: int, deadline: float | None) -> bytes:
    """What the descriptor gives, at most one byte more than a secret may have."""
    raw = b""
    while len(raw) <= MAX_BYTES:
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
        chunk = os.read(descriptor, MAX_BYTES + 1 - len(raw))
        if not chunk:
            break
        raw += chunk
    return raw


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else "not possible"


def _text(raw: bytes, name: str) -> str:
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"secret {name}: is longer than {MAX_BYTES // 1024} KiB")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise ConfigError(f"secret {name}: is not UTF-8 text")
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ConfigError(f"secret {name}: is empty")
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"secret {name}: holds a newline or another control character")
    return text
