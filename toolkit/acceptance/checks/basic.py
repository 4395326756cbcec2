"""The server generates real tokens, and goes on doing so."""

from __future__ import annotations

from toolkit.acceptance.exchange import Ask, Generation
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session

MANY = 150

_PROMPTS = 4
_TOKENS = 8


def real_tokens(session: Session) -> CheckResult:
    """Prompts are answered with as many tokens as asked for, and not all with the same ones.

    A model whose logits are no numbers answers every prompt with one repeated token.
    """
    asks = [Ask(prompt, _TOKENS) for prompt in session.prompts[:_PROMPTS]]
    answers = session.send(asks, concurrency=_PROMPTS)
    fixed = session.identity.kind != "openai"
    counts = [_count(answer) for answer in answers]
    fault = ""
    if any(count != _TOKENS if fixed else not count for count in counts):
        fault = "the server answers, but generates nothing of use"
    elif len({answer.output_ids or answer.text for answer in answers}) == 1:
        fault = f"{_PROMPTS} different prompts get one and the same answer: {answers[0].text[:40]!r}"
    return CheckResult(
        "real_tokens",
        "failed" if fault else "passed",
        measured={"prompts": _PROMPTS, "tokens": counts},
        expected=f"{_TOKENS} tokens to each prompt" if fixed else "at least one token to each prompt",
        detail=fault,
    )


def _count(answer: Generation) -> int:
    """Tokens of an answer that shows any; characters where the server does not count tokens."""
    if not answer.text and not answer.output_ids:
        return 0
    return answer.completion_tokens or len(answer.output_ids or answer.text)


def many_requests(session: Session) -> CheckResult:
    """More than 150 requests are answered, and one more after them."""
    session.loaded  # noqa: B018 - sends the requests under load
    session.send([Ask(session.prompts[0], 2)], concurrency=1)
    return CheckResult(
        "many_requests",
        "passed" if session.answered > MANY else "failed",
        measured={"answered": session.answered},
        expected=f"more than {MANY} requests answered",
    )
