"""Finds stop strings in a growing output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """Watches the text of an output for stop strings, token by token.

    A stop string may begin and end inside tokens. A token may end inside a UTF-8 sequence, and its text may
    depend on the token before it, so new text is the difference of two decodings from one starting token.

    Args:
        stop: the stop strings.
        decode: token ids -> text.
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._keep = max(map(len, stop), default=1) - 1
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Take the next token; returns the stop string that it completes, of several the leftmost."""
        self._pending.append(token)
        before = self._decode(self._context)
        text = self._tail + self._decode(self._context + self._pending)[len(before) :]
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            return min(found)[2]
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._context, self._pending = self._pending, []
            self._tail = text[-self._keep :] if self._keep else ""
        return None
