"""Lossless by probing: greedy speculative output equals what the model alone would have generated.

Outputs are generated without a cache salt, alone and in a batch of 16; every one of their prefixes is
probed for its next token under a fresh salt (see `toolkit.acceptance.probing`). The check has a control
that runs with it: an output with one token replaced must not pass.
"""

from __future__ import annotations

from toolkit.acceptance.checks.equality import delta, describe, judged_figures, judgement_status
from toolkit.acceptance.probing import Judgement, Output
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import ALONE, BATCH, Session

MIN_POSITIONS = 512
MIN_ACCEPTANCE_LENGTH = 1.2

_EXPECTED = (
    f"at least {MIN_POSITIONS} positions equal to plain decoding, alone and in a batch of {BATCH}, "
    f"near-ties at most 1%, acceptance length at least {MIN_ACCEPTANCE_LENGTH}"
)


def _obstacle(session: Session) -> CheckResult | None:
    """Why the check cannot be made here, or None."""
    reason = None
    if session.algorithm == "NONE":
        reason = "the server decodes without speculation"
    elif not session.endpoint.token_ids:
        reason = "the server does not take and give token ids"
    elif not session.has_token_ids:
        reason = "the server does not tell the prompts' token ids (no /tokenize)"
    elif session.alone.outputs is None or session.batch.outputs is None:
        reason = "the server does not give the output's token ids"
    if reason is not None:
        return CheckResult("lossless", "not_checked", expected=_EXPECTED, detail=reason)
    if session.isolation == "none":
        return CheckResult(
            "lossless",
            "inconclusive",
            expected=_EXPECTED,
            detail="the server honours no cache salt and its cache cannot be flushed (admin key?), "
            "so probes could be answered from the very K/V under suspicion",
        )
    return None


def lossless(session: Session) -> CheckResult:
    """Every output token equals the plain model's choice, by the near-tie rule."""
    obstacle = _obstacle(session)
    if obstacle is not None:
        return obstacle
    alone = session.decoder.judge(session.alone.outputs or [], delta=delta(session))
    batch = session.decoder.judge(session.batch.outputs or [], delta=delta(session))
    lengths = [
        estimate.value for run in (session.alone, session.batch) if (estimate := run.acceptance_length)
    ]
    figures: dict[str, object] = {
        "alone": judged_figures(session, alone),
        "batch": judged_figures(session, batch),
        "acceptance_length": round(min(lengths), 4) if lengths else None,
        "isolation": session.isolation,
    }
    for judgement, where in ((alone, "alone"), (batch, f"in a batch of {BATCH}")):
        status = judgement_status(session, judgement)
        if status != "passed":
            detail = f"{where}: {describe(session, judgement)}"
            return CheckResult("lossless", status, measured=figures, expected=_EXPECTED, detail=detail)
    return _strength(alone, batch, min(lengths) if lengths else None, figures)


def _strength(
    alone: Judgement, batch: Judgement, length: float | None, figures: dict[str, object]
) -> CheckResult:
    """Whether outputs that are all right also show something: enough positions, and real speculation."""
    if min(alone.positions, batch.positions) < MIN_POSITIONS:
        detail = f"outputs were too short: {alone.positions} positions alone, {batch.positions} in a batch"
        return CheckResult("lossless", "inconclusive", measured=figures, expected=_EXPECTED, detail=detail)
    if length is None or length < MIN_ACCEPTANCE_LENGTH:
        known = "is unknown" if length is None else f"is {length:.2f}"
        detail = f"the acceptance length {known}: hardly a drafted token was put to the test"
        return CheckResult("lossless", "inconclusive", measured=figures, expected=_EXPECTED, detail=detail)
    return CheckResult("lossless", "passed", measured=figures, expected=_EXPECTED)


def lossless_control(session: Session) -> CheckResult:
    """The check itself refuses an output in which one token is replaced."""
    expected = "an output with one token replaced is found out"
    obstacle = _obstacle(session)
    if obstacle is not None:
        return CheckResult("lossless_control", obstacle.status, expected=expected, detail=obstacle.detail)
    altered = _alter((session.alone.outputs or [])[ALONE - 1])
    judgement = session.decoder.judge([altered], delta=delta(session))
    last = len(altered.tokens) - 1
    found = any(d.position == last and d.near_tie is False for d in judgement.differences)
    return CheckResult(
        "lossless_control",
        "passed" if found else "failed",
        measured={"position": last, "found": found},
        expected=expected,
        detail="" if found else "the probes agree with a wrong token: they show nothing on this server",
    )


def _alter(output: Output) -> Output:
    """The first half of an output, its last token replaced by another one that the run knows."""
    half = len(output.tokens) // 2
    right = output.tokens[half]
    wrong = next((token for token in output.prompt + output.tokens if token != right), right + 1)
    return Output(output.prompt, (*output.tokens[:half], wrong))
