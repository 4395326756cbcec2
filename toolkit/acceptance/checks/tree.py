"""The tree against the chain: per-request limits turn the same server into linear DFLASH."""

from __future__ import annotations

from toolkit.acceptance.checks.equality import same_tokens
from toolkit.acceptance.estimates import paired_difference
from toolkit.acceptance.exchange import EndpointError
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Session

_EXPECTED = "cap 1 and budget block size - 1 give the tree's tokens"


def _obstacle(session: Session) -> str | None:
    if session.algorithm != "DDTREE":
        return f"the server decodes with {session.algorithm or 'an unknown algorithm'}, not with DDTREE"
    if session.block_size is None:
        return "the block size is unknown: give it as block_size"
    if not session.endpoint.native:
        return "the server takes no per-request tree limits"
    return None


def chain_control(session: Session) -> CheckResult:
    """The chain, set per request, gives the same tokens as the tree; its acceptance length is the base."""
    reason = _obstacle(session)
    if reason is not None:
        return CheckResult("chain_control", "not_checked", expected=_EXPECTED, detail=reason)
    try:
        chain = session.chain
    except EndpointError as error:
        if not error.refused:
            raise
        return CheckResult(
            "chain_control",
            "failed",
            expected=_EXPECTED,
            detail=f"a DDTREE server refuses the chain's tree limits: {error}",
        )
    return same_tokens("chain_control", session, session.batch, chain, _EXPECTED)


def tree_against_chain(session: Session) -> CheckResult:
    """The tree's acceptance length is not below the chain's on the same prompts.

    Statistics: `d_i` is the difference of the two acceptance lengths of prompt `i`, both runs at the same
    concurrency. The check fails if the mean of the `d_i` is more than two of its standard errors
    (`s_d / sqrt(n)`) below 0. The tree contains the chain, so a fall beyond chance is a fault: in positions,
    masks, or a graph of the wrong width.
    """
    expected = "not below the chain by more than 2 standard errors"
    name = "tree_against_chain"
    reason = _obstacle(session)
    if reason is not None:
        return CheckResult(name, "not_checked", "performance", expected=expected, detail=reason)
    try:
        tree, chain = session.batch.acceptance_lengths, session.chain.acceptance_lengths
    except EndpointError as error:
        if not error.refused:
            raise
        return CheckResult(name, "not_checked", "performance", expected=expected, detail=str(error))
    if tree is None or chain is None:
        detail = "the server tells no verify steps per request"
        return CheckResult(name, "not_checked", "performance", expected=expected, detail=detail)
    difference = paired_difference(tree, chain)
    error_of_mean = difference.standard_error or 0.0
    below = difference.value < -2 * error_of_mean
    pooled = {
        run: round(estimate.value, 4)
        for run, estimate in (
            ("tree", session.batch.acceptance_length),
            ("chain", session.chain.acceptance_length),
        )
        if estimate
    }
    return CheckResult(
        name,
        "failed" if below else "passed",
        "performance",
        measured=pooled
        | {
            "mean_difference": round(difference.value, 4),
            "standard_error": round(error_of_mean, 4),
            "prompts": len(tree),
        },
        expected=expected,
        detail="a tree contains the chain: look at positions, the ancestor mask and graph widths"
        if below
        else "",
    )
