"""Whether two greedy runs over the same prompts gave the same tokens, by the near-tie rule."""

from __future__ import annotations

from toolkit.acceptance.probing import Judgement, Output, first_difference, near_tie_delta
from toolkit.acceptance.result import CheckResult, Status
from toolkit.acceptance.session import Run, Session


def delta(session: Session) -> float:
    """The near-tie rule's delta for this server."""
    settings = session.settings
    return near_tie_delta(session.dtype, top_logit=settings.top_logit, fp8_kv_cache=settings.fp8_kv_cache)


def judgement_status(session: Session, judgement: Judgement) -> Status:
    """Failed for a difference that is no near-tie; inconclusive where it cannot be told."""
    if judgement.too_many:
        return "failed"
    if judgement.wrong:
        # Against float32's delta nothing is shown about a model in an unknown, coarser format.
        return "failed" if session.dtype is not None else "inconclusive"
    return "inconclusive" if judgement.open else "passed"


def describe(session: Session, judgement: Judgement, prompts: list[int] | None = None) -> str:
    """The first differences in words; nothing if there are none."""
    worst = judgement.wrong or tuple(d for d in judgement.differences if d.near_tie is None)
    if not worst:
        return ""
    first = worst[0]
    number = first.output if prompts is None else prompts[first.output]
    text = (
        f"{len(judgement.differences)} of {judgement.positions} positions differ from plain decoding; first: "
        f"prompt {number}, token {first.position}: {first.token} instead of {first.plain}"
    )
    if first.near_tie is None and not judgement.too_many:
        text += "; whether they are near-ties could not be shown: the server takes no logit bias"
    elif session.dtype is None:
        text += "; the server's number format is unknown: give it as dtype"
    elif session.dtype != "float32" and session.settings.top_logit is None:
        text += f"; near-tie delta {delta(session):g} assumes a top logit of 8: give the model's as top_logit"
    return text


def judged_figures(session: Session, judgement: Judgement) -> dict[str, float]:
    """Figures of a judgement for a report."""
    return {
        "positions": judgement.positions,
        "differences": len(judgement.differences),
        "near_ties": judgement.near_ties,
        "delta": delta(session),
    }


def same_tokens(name: str, session: Session, first: Run, second: Run, expected: str) -> CheckResult:
    """Compare two greedy runs over the same prompts.

    Where token ids are known, the outputs that differ are both held against plain decoding from their
    first difference on. Without them texts are compared, and a difference proves nothing.
    """
    one, two = first.outputs, second.outputs
    if one is None or two is None or not session.has_token_ids:
        return _same_texts(name, first, second, expected)
    differing = [
        (i, place)
        for i, (a, b) in enumerate(zip(one, two, strict=True))
        if (place := first_difference(a.tokens, b.tokens)) is not None
    ]
    figures = {"outputs": len(one), "different": len(differing)}
    if not differing:
        return CheckResult(name, "passed", measured=figures, expected=expected)
    short = [i for i, place in differing if place >= min(len(one[i].tokens), len(two[i].tokens))]
    if short:
        return CheckResult(
            name,
            "failed",
            measured=figures,
            expected=expected,
            detail=f"prompt {short[0]}: one output is shorter",
        )
    return _judge_differing(name, session, one, two, differing, figures, expected)


def _judge_differing(
    name: str,
    session: Session,
    one: list[Output],
    two: list[Output],
    differing: list[tuple[int, int]],
    figures: dict[str, int],
    expected: str,
) -> CheckResult:
    if session.isolation == "none":
        return CheckResult(
            name,
            "inconclusive",
            measured=figures,
            expected=expected,
            detail="outputs differ, and without a cache salt or a flush a near-tie cannot be told",
        )
    total = sum(len(output.tokens) - 1 for output in one) + sum(len(output.tokens) - 1 for output in two)
    cut = [(i, outputs[i], place) for i, place in differing for outputs in (one, two)]
    # Each divergent part is judged as its own output, whose prompt runs up to the first difference.
    parts = [Output(output.prompt + output.tokens[:place], output.tokens[place:]) for _, output, place in cut]
    judged = session.decoder.judge(parts, delta=delta(session), start=0)
    judgement = Judgement(total, judged.differences)
    return CheckResult(
        name,
        judgement_status(session, judgement),
        measured=figures | judged_figures(session, judgement),
        expected=expected,
        detail=describe(session, judgement, [i for i, _, _ in cut]),
    )


def _same_texts(name: str, first: Run, second: Run, expected: str) -> CheckResult:
    different = sum(a.text != b.text for a, b in zip(first.answers, second.answers, strict=True))
    return CheckResult(
        name,
        "inconclusive" if different else "passed",
        measured={"outputs": len(first.answers), "different": different},
        expected=expected,
        detail="texts differ; without token ids it cannot be told whether by a near-tie" if different else "",
    )
