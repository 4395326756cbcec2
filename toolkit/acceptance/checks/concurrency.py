"""16 requests at once against one at a time, over the same 8 prompts."""

from __future__ import annotations

from dataclasses import replace

from toolkit.acceptance.checks.equality import same_tokens
from toolkit.acceptance.estimates import paired_difference, ratio
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import ALONE, BATCH, Run, Session

FEW_STEPS = 2000
TOLERANCE = 0.01


def _shared(session: Session) -> Run:
    """Those of the 16 that were also sent alone."""
    batch = session.batch
    return replace(batch, asks=batch.asks[:ALONE], answers=batch.answers[:ALONE], counted={})


def batch_tokens(session: Session) -> CheckResult:
    """A prompt gives the same greedy tokens beside 15 others as alone."""
    return same_tokens(
        "batch_tokens",
        session,
        session.alone,
        _shared(session),
        f"same greedy tokens in a batch of {BATCH} as alone",
    )


def batch_acceptance(session: Session) -> CheckResult:
    """Acceptance length in a batch is within 1% of that alone.

    Where fewer than 2000 verify steps make 1% smaller than chance, a mean paired difference within two of
    its standard errors passes as well.
    """
    name, expected = "batch_acceptance", "within 1% of alone, or within 2 standard errors where steps are few"
    alone, batch = session.alone.steps, _shared(session).steps
    if session.algorithm == "NONE" or alone is None or batch is None:
        detail = (
            "the server decodes without speculation"
            if session.algorithm == "NONE"
            else "the server tells no verify steps per request"
        )
        return CheckResult(name, "not_checked", "performance", expected=expected, detail=detail)
    one, many = ratio(alone), ratio(batch)
    if one is None or many is None:
        return CheckResult(
            name, "not_checked", "performance", expected=expected, detail="no verify step was made"
        )
    difference = paired_difference([t / s for t, s in batch], [t / s for t, s in alone])
    close = abs(many.value - one.value) <= TOLERANCE * one.value
    few = sum(s for _, s in alone) < FEW_STEPS
    chance = few and abs(difference.value) <= 2 * (difference.standard_error or 0.0)
    return CheckResult(
        name,
        "passed" if close or chance else "failed",
        "performance",
        measured={
            "alone": round(one.value, 4),
            "batch": round(many.value, 4),
            "mean_difference": round(difference.value, 4),
            "standard_error": round(difference.standard_error or 0.0, 4),
        },
        expected=expected,
        detail=""
        if close or chance
        else "look at the largest captured graph and at padding rows of the batch",
    )
