"""Requests at temperature 1 are really sampled."""

from __future__ import annotations

from toolkit.acceptance.exchange import Ask, Generation
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session

_PROMPTS = 4
_TOKENS = 32
_SEEDS = (101, 202, 101)
_EXPECTED = "different texts for different seeds, none of them all greedy; the same text for the same seed"


def sampling(session: Session) -> CheckResult:
    """Seeds tell the texts apart, and a seed repeated gives its text again.

    The repeat is required of the toolkit's own engine only: elsewhere a seed is best effort.
    """
    prompts = session.prompts[:_PROMPTS]
    asks = [Ask(prompt, _TOKENS, temperature=1.0, seed=seed) for seed in _SEEDS for prompt in prompts]
    answers = session.run(asks, concurrency=len(asks)).answers
    first, other, again = (answers[i : i + _PROMPTS] for i in range(0, len(asks), _PROMPTS))
    greedy = session.alone.answers[:_PROMPTS]
    differ = sum(_content(a) != _content(b) for a, b in zip(first, other, strict=True))
    off_greedy = sum(not _starts_with(g, s) for g, s in zip(greedy, first, strict=True))
    repeated = sum(_content(a) == _content(b) for a, b in zip(first, again, strict=True))
    figures = {"prompts": _PROMPTS, "differ_by_seed": differ, "not_greedy": off_greedy, "repeated": repeated}
    if differ == 0 or off_greedy == 0:
        detail = "temperature 1 gives greedy or constant text: the request's temperature or seed is dropped"
        return CheckResult("sampling", "failed", measured=figures, expected=_EXPECTED, detail=detail)
    if repeated < _PROMPTS and session.identity.kind == "embedded":
        detail = f"{_PROMPTS - repeated} of {_PROMPTS} texts change although prompt and seed are the same"
        return CheckResult("sampling", "failed", measured=figures, expected=_EXPECTED, detail=detail)
    detail = "" if repeated == _PROMPTS else "the seed is not honoured (best effort on this server)"
    return CheckResult("sampling", "passed", measured=figures, expected=_EXPECTED, detail=detail)


def _content(answer: Generation) -> object:
    return answer.output_ids or answer.text


def _starts_with(greedy: Generation, sampled: Generation) -> bool:
    if greedy.output_ids and sampled.output_ids:
        return greedy.output_ids[: len(sampled.output_ids)] == sampled.output_ids
    return greedy.text.startswith(sampled.text)
