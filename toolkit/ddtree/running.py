"""A request while it runs: its tokens, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.ddtree.sampling import Sampler
from toolkit.ddtree.stopping import StopStrings
from toolkit.ddtree.types import FinishReason, Output, Request, RoundStats, TreeLimits


@dataclass(slots=True, eq=False)
class Running:
    """State of one request in the batch.

    Attributes:
        request: what was asked.
        sampler: makes the target's choices.
        limits: limits of its trees.
        stop_ids: tokens that end it.
        stop_strings: watches for its stop strings; None if it has none.
        max_new_tokens: output tokens at most, the context limit considered.
        tokens: prompt and output.
        length: committed K/V rows; the last token has none yet while the request runs.
        cached_tokens: prompt tokens whose K/V came from the prefix cache.
    """

    request: Request
    sampler: Sampler
    limits: TreeLimits
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    max_new_tokens: int
    tokens: list[int]
    length: int = 0
    cached_tokens: int = 0

    @property
    def root(self) -> int:
        """The last token, root of the next round."""
        return self.tokens[-1]

    @property
    def pending(self) -> int:
        """Tokens without K/V rows."""
        return len(self.tokens) - self.length

    def commit(self, new: Sequence[int], stats: RoundStats | None = None) -> Output:
        """Append tokens up to the one that ends the request, and say what became of it."""
        taken: list[int] = []
        finish: FinishReason | None = None
        matched: int | str | None = None
        produced = len(self.tokens) - len(self.request.input_ids)
        for token in new[: self.max_new_tokens - produced]:
            taken.append(token)
            matched = token if token in self.stop_ids else None
            if matched is None and self.stop_strings is not None:
                matched = self.stop_strings.push(token)
            if matched is not None:
                finish = FinishReason.STOP
                break
        if finish is None and produced + len(taken) >= self.max_new_tokens:
            finish = FinishReason.LENGTH
        self.tokens.extend(taken)
        self.sampler.commit(taken)
        return Output(
            self.request.rid, tuple(taken), finish, matched, cached_tokens=self.cached_tokens, round=stats
        )
