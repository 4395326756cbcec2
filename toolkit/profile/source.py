"""Where a checkpoint comes from: `hf://`, `https://` and `peer://`, each at a revision."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

Kind = Literal["hf", "https", "peer"]
SCHEMES = ("hf://", "https://", "http://", "peer://")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_MODELS = "--"  # joins owner and repository, as in the hub's own cache


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint at one revision.

    Attributes:
        kind: how it is fetched.
        location: repository, URL with a final slash, or the peer's name in the inventory.
        name: name of the checkpoint.
        revision: commit of a repository; else the name that whoever publishes it gave this state of it.
    """

    kind: Kind
    location: str
    name: str
    revision: str

    @property
    def folder(self) -> str:
        """Name of its folder below the host's models: `name@revision`."""
        return f"{self.name}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Whether the revision can never mean other files."""
        return self.kind != "hf" or _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        if self.kind == "hf":
            return f"hf://{self.location}@{self.revision}"
        if self.kind == "peer":
            return f"peer://{self.location}/{self.folder}"
        return f"{self.location} at {self.revision}"


def is_remote(text: str) -> bool:
    """Whether a source is fetched, and not a folder on the host or the bundled checkpoint."""
    return text.startswith(SCHEMES)


def parse(text: str, revision: str | None = None) -> Source:
    """A source as it is written in a profile.

    Args:
        text: `hf://OWNER/REPOSITORY[@REVISION]`, `https://HOST/FOLDER/` or `peer://HOST/NAME@REVISION`.
        revision: where the text does not name it.

    Raises:
        ValueError: it is none; says what is allowed.
    """
    if text.startswith("hf://"):
        return _hub(text, revision)
    if text.startswith("peer://"):
        return _peer(text, revision)
    return _folder(text, revision)


def trustworthy(url: str) -> bool:
    """Whether what comes from a URL cannot have been changed on the way: TLS, or this machine itself."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return bool(parts.hostname)
    try:
        return parts.scheme == "http" and ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def endpoint_problem(url: str) -> str | None:
    """What is wrong with a hub's address; None where nothing is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    if not trustworthy(url) or port == 0:
        return "is no https:// URL"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return "holds more than host and path: take out user, ? and #"
    return None


def _hub(text: str, revision: str | None) -> Source:
    repository, at, named = text.removeprefix("hf://").partition("@")
    parts = repository.split("/")
    if len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise ValueError("names no repository: write hf://OWNER/REPOSITORY@COMMIT")
    found = _one(named if at else None, revision, "hf://OWNER/REPOSITORY@COMMIT")
    if not _REF.fullmatch(found) or ".." in found:
        raise ValueError(f"names no revision: {found!r}")
    return Source("hf", repository, _MODELS.join(parts), found)


def _peer(text: str, revision: str | None) -> Source:
    host, _, rest = text.removeprefix("peer://").partition("/")
    name, at, named = rest.rstrip("/").partition("@")
    if not _HOST.fullmatch(host) or not _NAME.fullmatch(name):
        raise ValueError("names no checkpoint of a host: write peer://HOST/NAME@REVISION")
    found = _one(named if at else None, revision, "peer://HOST/NAME@REVISION")
    return Source("peer", host, name, _label(found))


def _folder(text: str, revision: str | None) -> Source:
    if (problem := endpoint_problem(text)) is not None:
        raise ValueError(problem)
    url = text if text.endswith("/") else f"{text}/"
    name = unquote(urlsplit(url).path).rstrip("/").rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise ValueError("ends with no name of a checkpoint: write https://HOST/NAME/")
    if revision is None:
        raise ValueError(
            "needs a revision: any name for this state of the files, or sha256-HASH of their SHA256SUMS"
        )
    return Source("https", url, name, _label(revision))


def _one(named: str | None, revision: str | None, form: str) -> str:
    if named and revision and named != revision:
        raise ValueError(f"names revision {named!r}, the key `revision` {revision!r}")
    found = named or revision
    if not found:
        raise ValueError(f"needs a revision: write {form}")
    return found


def _label(revision: str) -> str:
    if not _NAME.fullmatch(revision):
        raise ValueError(f"has revision {revision!r}: write 1 to 96 of letters, digits and '.', '_', '-'")
    return revision
