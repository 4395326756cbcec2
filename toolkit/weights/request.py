"""What a host is asked to do with checkpoints: one JSON object, never part of a command line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError
from toolkit.layout import Layout
from toolkit.profile.source import endpoint_problem, parse
from toolkit.weights.bring import Terms
from toolkit.weights.origins import HUB, Origin, Peer

RUN = Path("/run")  # in memory (file-hierarchy(7)): what holds a token or a key is on no disk
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Wish:
    """A checkpoint that a host is to have.

    Attributes:
        origin: where it comes from.
        terms: how it is fetched.
        layout: where things lie on the host.
    """

    origin: Origin
    terms: Terms
    layout: Layout

    @property
    def folder(self) -> Path:
        """Where it lies when it is complete."""
        return self.terms.models / self.origin.source.folder

    @property
    def unit(self) -> str:
        """Name of the work, the same whoever asks for it."""
        return f"weights-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:_DIGITS]}"


def layout_in(request: Mapping[str, Any]) -> Layout:
    """Where things lie, as a request says."""
    root = request.get("root")
    return Layout(None if root is None else Path(root).expanduser().absolute())


def wish_of(request: Mapping[str, Any]) -> Wish:
    """What a request asks for.

    Args:
        request: `source`, and where they are given `revision`, `root`, `endpoint`, `rate` (bytes a second),
            `parallel`, `min_free` (bytes) and `peer` (`url`, `token`, `certificate`).

    Raises:
        ConfigError: the source is none.
    """
    text = str(request["source"])
    try:
        source = parse(text, request.get("revision"))
    except ValueError as error:
        raise ConfigError(f"source {text!r} {error}") from None
    endpoint = str(request.get("endpoint") or HUB)
    if (problem := endpoint_problem(endpoint)) is not None:
        raise ConfigError(f"the hub's address {endpoint!r} {problem}")
    peer = request.get("peer")
    layout = layout_in(request)
    terms = Terms(
        layout.models,
        rate=request.get("rate"),
        parallel=int(request.get("parallel") or 4),
        min_free=int(request.get("min_free") or 0),
    )
    return Wish(Origin(source, endpoint, None if peer is None else Peer(**peer)), terms, layout)
