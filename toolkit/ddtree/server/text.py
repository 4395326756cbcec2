"""Incremental detokenisation: text deltas whose concatenation is the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of tokens into text.

    A token may end inside a UTF-8 sequence, and a tokenizer may render a token differently at the start of
    a text. So a delta is the difference of two decodings that start at the same earlier token, and it
    is held back while the text ends in an incomplete character, or in what may grow into a stop string.

    Args:
        decode: token ids -> text.
        stop: stop strings that end the text and are cut from it; empty if they are to stay.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._prefix = 0  # start of the decoded window
        self._read = 0  # tokens before it are in `_text`
        self._text = ""
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Take further tokens; returns the text that is certain now and was not before."""
        self._tokens.extend(tokens)
        self._advance(self._window())
        return self._send(len(self._text) - self._held())

    def finish(self, tokens: Sequence[int] = (), matched: str | None = None) -> str:
        """Take the last tokens; returns the rest of the text, up to the stop string `matched`."""
        self._tokens.extend(tokens)
        self._text += self._window()
        end = len(self._text)
        if matched is not None and matched in self._stop:
            found = self._text.find(matched, self._earliest(matched))
            end = found if found >= 0 else end
        return self._send(end)

    def _earliest(self, matched: str) -> int:
        """Where `matched` may begin: it ends in the last token, since generation ended there."""
        before = self._decode(self._tokens[:-1])
        return max(0, len(before.rstrip(_INCOMPLETE)) - len(matched) + 1)

    @property
    def text(self) -> str:
        """All text returned so far."""
        return self._text[: self._sent]

    def _window(self) -> str:
        before = self._decode(self._tokens[self._prefix : self._read])
        return self._decode(self._tokens[self._prefix :])[len(before) :]

    def _advance(self, new: str) -> None:
        if new and not new.endswith(_INCOMPLETE):
            self._text += new
            self._prefix = self._read
            self._read = len(self._tokens)

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=0)
        tail = self._text[-longest:] if longest else ""
        for length in range(len(tail), 0, -1):
            if any(stop.startswith(tail[-length:]) for stop in self._stop):
                return length
        return 0

    def _send(self, end: int) -> str:
        delta = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return delta
