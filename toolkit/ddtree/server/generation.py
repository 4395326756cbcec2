"""What the event loop knows of one request in flight."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.types import FinishReason, Output, Request


@dataclass(eq=False)
class Generation:
    """One request in flight, as the event loop sees it.

    Attributes:
        rid: the client's name for it.
        request: what the engine was given, under an id that is never used again.
        changed: set whenever there is something new; the generations of one HTTP request share it.
        output_ids: tokens so far.
        finish, matched: why it ended and on what; `finish` is None while it goes on.
        error: set instead when the engine failed.
        cached_tokens: prompt tokens taken from the prefix cache.
        accepted: histogram, `accepted[n]` verify steps matched n draft tokens.
        drafted: tree nodes verified, without root and padding.
        created, first_token, last_token: `time.monotonic()` of these moments.
        counted: whether it shows in the metrics.
    """

    rid: str
    request: Request
    changed: asyncio.Event
    counted: bool = True
    output_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    matched: int | str | None = None
    error: ApiError | None = None
    cached_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    created: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    fresh: bool = False

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish is not None or self.error is not None

    @property
    def verify_steps(self) -> int:
        """How many verify steps it took."""
        return sum(self.accepted)

    @property
    def correct_drafts(self) -> int:
        """How many draft tokens matched."""
        return sum(length * steps for length, steps in enumerate(self.accepted))

    def take(self, output: Output, now: float) -> None:
        """Add what one round gave."""
        if output.token_ids:
            self.output_ids.extend(output.token_ids)
            self.first_token = self.first_token or now
            self.last_token = now
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.finish = output.finish
        self.matched = output.matched
        if output.round is not None:
            self.drafted += output.round.nodes
            missing = output.round.accepted + 1 - len(self.accepted)
            self.accepted.extend([0] * missing)
            self.accepted[output.round.accepted] += 1
