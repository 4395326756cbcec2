"""The server generates real tokens, and goes on doing so."""

from __future__ import annotations

from toolkit.acceptance.endpoint import Ask
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session

MANY = 150


def real_tokens(session: Session) -> CheckResult:
    """A prompt is answered with as many tokens as asked for, and with text."""
    wanted = 8
    answer = session.send([Ask(session.prompts[0], wanted)], concurrency=1)[0]
    count = answer.completion_tokens
    if count is None and answer.output_ids is not None:
        count = len(answer.output_ids)
    fixed = session.identity.kind != "openai"
    right = count == wanted if fixed else bool(count or answer.text)
    shown = bool(answer.text or answer.output_ids)
    return CheckResult(
        "real_tokens",
        "passed" if right and shown else "failed",
        measured={"tokens": count, "characters": len(answer.text)},
        expected=f"{wanted} tokens" if fixed else "at least one token",
        detail="" if right and shown else "the server answers, but generates nothing of use",
    )


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
