"""Asking a source what its checkpoint consists of."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from toolkit.errors import ConfigError, ToolkitError
from toolkit.profile.source import Source
from toolkit.weights.listing import WEIGHTS, File, Listing, checked, is_pickled, path_problem
from toolkit.weights.web import BROKEN, RefusedError, Web, reason, strong_tag

HUB = "https://huggingface.co"
SUMS = "SHA256SUMS"
INDEX = "model.safetensors.index.json"
LISTING = "listing.json"  # of a peer
PIN = "sha256-"  # begins a revision that names the SHA-256 of a folder's SHA256SUMS
_AT_ONCE = 8
_TAKEN = (WEIGHTS, ".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")  # of a repository
# What engines read beside weights and their index; those that a folder lacks are left out.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
)
_SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A host that hands out a checkpoint for the length of a transfer (`serve`).

    Attributes:
        url: of the checkpoint there, with a final slash.
        token: who has it may fetch.
        certificate: PEM, made for this transfer.
    """

    url: str
    token: str
    certificate: str


@dataclass(frozen=True, slots=True)
class Origin:
    """A source with the way to it.

    Attributes:
        source: what is wanted.
        endpoint: base URL of the model hub.
        peer: a host that has it already; it is asked instead of the source.
    """

    source: Source
    endpoint: str = HUB
    peer: Peer | None = None

    def web(self) -> Web:
        """Requests to it."""
        if self.peer is not None:
            return Web(token=self.peer.token, certificate=self.peer.certificate)
        return Web(token=hub_token() if self.source.kind == "hf" else None)

    def listing(self, web: Web) -> Listing:
        """What it consists of.

        Raises:
            ConfigError: only its peer has it, and nobody has introduced this host to it.
            ToolkitError: it cannot be reached, does not have it, or lists what is not fetched.
        """
        if self.peer is not None:
            return _of_peer(self.peer, self.source, web)
        if self.source.kind == "hf":
            return _of_hub(self.source, self.endpoint.rstrip("/"), web)
        if self.source.kind == "https":
            return _of_folder(self.source, web)
        raise ConfigError(
            f"{self.source} is fetched from host {self.source.location}, which is not asked from here",
            hint="name an inventory with both hosts: add -i inventory.yaml",
        )


def hub_token() -> str | None:
    """The token for the hub that `hf auth login` or HF_TOKEN gives; None without one."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    try:
        return (Path(home).expanduser() / "token").read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError, RuntimeError):
        return None


def _of_hub(source: Source, endpoint: str, web: Web) -> Listing:
    """From the hub's model API with `blobs`: commit, names, sizes, and SHA-256 of what is in LFS."""
    repository, revision = quote(source.location), quote(source.revision, safe="")
    answer = web.json(f"{endpoint}/api/models/{repository}/revision/{revision}?blobs=true")
    try:
        commit = str(answer["sha"])
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise ValueError(commit)
        files = [_sibling(item, f"{endpoint}/{repository}/resolve/{commit}/") for item in answer["siblings"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ToolkitError(
            f"{endpoint} does not answer as a model hub does", hint="is the endpoint's address right?"
        ) from None
    if source.pinned and commit != source.revision:
        raise ToolkitError(f"{endpoint} gives commit {commit} of {source.location}, not {source.revision}")
    taken = [file for file in files if _is_taken(file.path)]
    left_out = {file.path for file in files} - {file.path for file in taken}
    return Listing(
        checked(taken, source), commit, sorted(left_out, key=lambda path: (not is_pickled(path), path))
    )


def _sibling(item: dict[str, Any], base: str) -> File:
    path, lfs = str(item["rfilename"]), item.get("lfs")
    url = urljoin(base, quote(path))
    if lfs:
        return File(path, int(lfs["size"]), url, sha256=str(lfs["sha256"]))
    return File(path, int(item["size"]), url, git=str(item["blobId"]))


def _is_taken(path: str) -> bool:
    """What an engine reads lies at the top; folders hold the same weights in other forms, and pictures."""
    return "/" not in path and path.endswith(_TAKEN) and path_problem(path) is None


def commit_of(origin: Origin) -> str:
    """The commit that a repository's revision stands for now.

    Raises:
        ToolkitError: the hub cannot be asked, or does not have it.
    """
    return str(origin.listing(origin.web()).revision)


def _of_folder(source: Source, web: Web) -> Listing:
    pin = source.revision.removeprefix(PIN) if source.revision.startswith(PIN) else None
    try:
        sums: bytes | None = web.read(urljoin(source.location, SUMS))
    except RefusedError as error:
        if pin is not None:
            raise ToolkitError(f"{error.message}; revision {source.revision} is that of its {SUMS}") from None
        sums = None
    if sums is None:
        return _of_index(source, web)
    found = hashlib.sha256(sums).hexdigest()
    if pin is not None and found != pin:
        raise ToolkitError(
            f"{source.location}{SUMS} has SHA-256 {found}, not {pin} as the revision says",
            hint="its files have changed: if that is right, name the new revision",
        )
    files, hidden = [], []
    for number, line in enumerate(_text(sums, source).splitlines(), 1):
        if not line.strip():
            continue
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise ToolkitError(f"{source.location}{SUMS}:{number}: is no `HASH  NAME` line")
        if match[2].startswith(".") and "/" not in match[2]:
            hidden.append(match[2])
            continue
        files.append(File(match[2], 0, urljoin(source.location, quote(match[2])), sha256=match[1].lower()))
    return Listing(_sized(checked(files, source), web), None, hidden)


def _of_index(source: Source, web: Web) -> Listing:
    """From the weights' index; what it does not name is looked for."""
    try:
        index = json.loads(_text(web.read(urljoin(source.location, INDEX)), source))
        shards = sorted({str(name) for name in index["weight_map"].values()})
    except RefusedError:
        raise ToolkitError(
            f"{source.location} has neither {SUMS} nor {INDEX}",
            hint=f"in that folder: sha256sum * > {SUMS}",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ToolkitError(f"{source.location}{INDEX} is no index of safetensors") from None
    if wrong := next((name for name in shards if is_pickled(name)), None):
        raise ToolkitError(f"{source.location}{INDEX} names {wrong}, a pickle; only safetensors are served")
    files = checked((File(name, 0, urljoin(source.location, quote(name))) for name in shards), source)
    small = [File(name, 0, urljoin(source.location, name)) for name in (INDEX, *_COMPANIONS)]
    return Listing((*_sized(files, web), *_sized(small, web, optional=True)))


def _of_peer(peer: Peer, source: Source, web: Web) -> Listing:
    answer = web.json(urljoin(peer.url, LISTING))
    try:
        files = [
            File(str(path), int(item["size"]), urljoin(peer.url, quote(path)), sha256=str(item["sha256"]))
            for path, item in answer["files"].items()
        ]
        commit, origin = answer["revision"], str(answer["source"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ToolkitError(f"{peer.url} does not answer as a peer does") from None
    return Listing(checked(files, source), commit, origin=origin)


def _sized(files: Sequence[File], web: Web, *, optional: bool = False) -> tuple[File, ...]:
    """The files with their sizes, asked for one by one; absent ones are left out if `optional`."""

    def one(file: File) -> File | None:
        try:
            with web.open(file.url, method="HEAD") as response:
                size = int(response.headers["Content-Length"])
                return replace(file, size=size, validator=strong_tag(response.headers))
        except RefusedError:
            if optional:
                return None
            raise
        except (KeyError, TypeError, ValueError):
            raise ToolkitError(f"{file.url}: the server does not tell its size") from None
        except BROKEN as error:
            raise ToolkitError(f"{file.url}: {reason(error)}") from None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(file for file in pool.map(one, files) if file is not None)


def _text(data: bytes, source: Source) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ToolkitError(f"{source.location}: its listing is not UTF-8") from None
