"""A streamed answer is the same as one that is not streamed."""

from __future__ import annotations

from dataclasses import replace

from toolkit.acceptance.checks.equality import same_tokens
from toolkit.acceptance.endpoint import Way
from toolkit.acceptance.exchange import Ask, Generation
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session

_EACH = 4
_EXPECTED = "same tokens and text streamed as not"


def streaming(session: Session) -> CheckResult:
    """Streams put together give the tokens and the text of the plain answers, on each streaming endpoint."""
    whole = replace(session.alone, asks=session.alone.asks[:_EACH], answers=session.alone.answers[:_EACH])
    results = []
    for way in _ways(session):
        pieces = session.run(whole.asks, concurrency=_EACH, way=way)
        result = same_tokens("streaming", session, whole, pieces, _EXPECTED)
        fault = _text_fault(session, whole.asks, whole.answers, pieces.answers, way)
        if fault is not None:
            return replace(result, status="failed", detail=fault)
        results.append(result)
    failed = [result for result in results if result.status == "failed"]
    return failed[0] if failed else replace(results[0], measured={"streams": len(results) * _EACH})


def _ways(session: Session) -> tuple[Way, ...]:
    return ("native_stream", "openai_stream") if session.endpoint.native else ("openai_stream",)


def _text_fault(
    session: Session,
    asks: tuple[Ask, ...],
    whole: tuple[Generation, ...],
    pieces: tuple[Generation, ...],
    way: Way,
) -> str | None:
    """What is wrong with the streamed texts, or None."""
    path = "/generate" if way == "native_stream" else "/v1/completions"
    for number, (ask, one, two) in enumerate(zip(asks, whole, pieces, strict=True)):
        if one.output_ids is not None and two.output_ids is not None and one.output_ids != two.output_ids:
            continue  # other tokens: judged as tokens, and their text must differ
        if one.text == two.text:
            if None not in (one.completion_tokens, two.completion_tokens) and (
                one.completion_tokens != two.completion_tokens
            ):
                return (
                    f"{path}: prompt {number}: {two.completion_tokens} tokens reported by the stream, "
                    f"{one.completion_tokens} without streaming"
                )
            continue
        # Texts without ids: a second pair rules out that greedy decoding itself came out otherwise.
        again = session.send([ask], concurrency=1)[0]
        repeat = session.send([ask], concurrency=1, way=way)[0]
        if again.text != repeat.text:
            place = next(
                (i for i, (a, b) in enumerate(zip(one.text, two.text, strict=False)) if a != b),
                min(len(one.text), len(two.text)),
            )
            return f"{path}: prompt {number}: the streamed text differs from character {place} on"
    return None
