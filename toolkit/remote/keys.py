"""Host keys: ed25519 only, always checked against known_hosts, added only with a given fingerprint."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ToolkitError, UnreachableError

KEY_TYPE = "ssh-ed25519"
_MARKED = ("@revoked", "@cert-authority")


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line of a known_hosts file that is about a host."""

    path: Path
    line: int
    blob: bytes
    revoked: bool


def fingerprint(blob: bytes) -> str:
    """A key's SHA-256 fingerprint as ssh-keygen prints it: `SHA256:...` (RFC 4648 base64 without padding)."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def is_fingerprint(text: str) -> bool:
    """Whether a text has the form of `fingerprint`."""
    return re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}", text) is not None


def known_keys(name: str, files: tuple[Path, ...]) -> list[KnownKey]:
    """The ed25519 keys that known_hosts files hold for a host; plain, hashed and pattern-free names.

    Args:
        name: as `SshOptions.known_as`.
        files: absent ones are skipped.

    Raises:
        ToolkitError: a file cannot be read.
    """
    found = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            key = _read_line(line, name)
            if key is not None:
                found.append(KnownKey(path, number, *key))
    return found


def check(host: str, name: str, files: tuple[Path, ...], blob: bytes) -> None:
    """Refuse a host whose key is unknown, another, or revoked.

    Args:
        host: its name in the inventory, for messages.
        name: its name in known_hosts.
        files: known_hosts files.
        blob: the key that it offered.

    Raises:
        UnreachableError: says which, with the fingerprint and the next step.
    """
    offered = fingerprint(blob)
    keys = known_keys(name, files)
    for key in keys:
        if key.revoked and key.blob == blob:
            raise UnreachableError(
                f"{host}: its key {offered} is revoked in {key.path}:{key.line}",
                hint="do not connect; find out why the key was revoked",
            )
    wanted = [key for key in keys if not key.revoked]
    if any(hmac.compare_digest(key.blob, blob) for key in wanted):
        return
    if wanted:
        known = wanted[0]
        raise UnreachableError(
            f"{host}: its key changed: it offers {offered}, but {known.path}:{known.line} has "
            f"{fingerprint(known.blob)}",
            hint=f"if it was reinstalled, take that line out: ssh-keygen -R '{name}' -f {known.path}; "
            "otherwise someone may be in between",
        )
    raise UnreachableError(
        f"{host}: its key is not known; it offers {KEY_TYPE} {offered}",
        hint=f"compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host, then: "
        f"ddtoolkit hosts trust {host} -i INVENTORY --fingerprint {offered}",
    )


def add(name: str, path: Path, blob: bytes) -> None:
    """Append a key under its hashed name (HMAC-SHA1 with a random salt, sshd(8)).

    Raises:
        ToolkitError: the file cannot be written.
    """
    salt = secrets.token_bytes(hashlib.sha1(usedforsecurity=False).digest_size)
    hashed = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    fields = (base64.b64encode(part).decode() for part in (salt, hashed, blob))
    salt_text, hash_text, key_text = fields
    line = f"|1|{salt_text}|{hash_text} {KEY_TYPE} {key_text}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0, 2)
            if file.tell() and _last_byte(path) != b"\n":
                file.write(b"\n")
            file.write(line.encode())
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be written: {error.strerror}") from error


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read()


def _read_line(line: str, name: str) -> tuple[bytes, bool] | None:
    words = line.split()
    revoked = False
    if words and words[0] in _MARKED:
        if words[0] != _MARKED[0]:
            return None
        revoked, words = True, words[1:]
    if len(words) < 3 or words[0].startswith("#") or words[1] != KEY_TYPE:
        return None
    if not any(_names(entry, name) for entry in words[0].split(",")):
        return None
    try:
        return base64.b64decode(words[2], validate=True), revoked
    except binascii.Error:
        return None


def _names(entry: str, name: str) -> bool:
    if not entry.startswith("|1|"):
        return entry == name
    try:
        _, _, salt, digest = entry.split("|")
        wanted = base64.b64decode(digest)
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(made, wanted)
