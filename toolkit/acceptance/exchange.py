"""What is asked of a served endpoint, what comes back, and the ways in which it can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.errors import ToolkitError

Prompt = str | tuple[int, ...]
Kind = Literal["embedded", "sglang", "vllm", "openai"]


class EndpointError(ToolkitError):
    """The server did not answer as asked.

    Args:
        message: what was asked and what came back.
        status: HTTP status, or None where no answer came.
    """

    def __init__(self, message: str, *, status: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether the server understood and said no (4xx)."""
        return self.status is not None and 400 <= self.status < 500

    @property
    def gone(self) -> bool:
        """Whether the server no longer serves: no answer, or a word that there is none (502, 503, 504)."""
        return self.status is None or self.status in (502, 503, 504)


class TimeUpError(ToolkitError):
    """The time limit of the whole acceptance is reached."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation request.

    Attributes:
        prompt: text, or token ids where the server takes them.
        max_new_tokens: tokens to generate; the end-of-text token does not end it where the server can
            be told so.
        temperature: 0 is greedy.
        seed: sampling seed.
        tree: per-request tree limits (`budget`, `topk_cap`, `expansion`); None takes the server's own.
        salt: cache salt; requests with different salts share no prefix K/V. None sends none.
        logit_bias: added to the logits, by token id.
    """

    prompt: Prompt
    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    tree: Mapping[str, Any] | None = None
    salt: str | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """What came back for one request.

    Attributes:
        text: generated text.
        output_ids: generated tokens, or None where the server does not tell them.
        prompt_ids: the prompt's tokens, where the server tells them.
        prompt_tokens: tokens of the prompt, or None.
        completion_tokens: generated tokens, or None.
        cached_tokens: prompt tokens whose K/V came from a prefix cache, or None.
        verify_steps: speculative verify steps, or None.
        correct_drafts: steps by number of matched draft tokens (index 0: none matched), or None.
        seconds: from sending to the last byte.
        first_token_seconds: from sending to the first token; streamed requests only.
    """

    text: str
    output_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    verify_steps: int | None = None
    correct_drafts: tuple[int, ...] | None = None
    seconds: float = 0.0
    first_token_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What stands behind the URL.

    Attributes:
        kind: which server, as far as it tells.
        version: the server's version, "" where it tells none.
        model: name under which the model is served.
        algorithm: speculative algorithm in capitals, "NONE" without one, None where unknown.
        block_size: drafted slots, bonus token included.
        budget: tree nodes without the root.
        topk_cap: the server's cap on candidates of one slot.
        dtype: "float32", "bfloat16", ..., None where unknown.
    """

    kind: Kind
    version: str = ""
    model: str = "default"
    algorithm: str | None = None
    block_size: int | None = None
    budget: int | None = None
    topk_cap: int | None = None
    dtype: str | None = None
