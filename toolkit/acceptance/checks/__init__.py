"""The checks, in the order in which they run.

A check takes a `Session` and gives results back; it raises only what the endpoint raises. Everything a
check sends goes through it, and it keeps answers that several checks use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.acceptance.checks.basic import many_requests, real_tokens
from toolkit.acceptance.checks.concurrency import batch_acceptance, batch_tokens
from toolkit.acceptance.checks.counters import metrics_agree
from toolkit.acceptance.checks.lossless import lossless, lossless_control
from toolkit.acceptance.checks.performance import acceptance_length, tokens_per_second
from toolkit.acceptance.checks.sampling import sampling
from toolkit.acceptance.checks.self_check import self_check
from toolkit.acceptance.checks.streaming import streaming
from toolkit.acceptance.checks.tree import chain_control, tree_against_chain
from toolkit.acceptance.result import Category, CheckResult
from toolkit.acceptance.session import Session


@dataclass(frozen=True, slots=True)
class Check:
    """A named check.

    Attributes:
        name: as in reports and in `required`.
        category: see `CheckResult`.
        run: does it.
    """

    name: str
    category: Category
    run: Callable[[Session], CheckResult]


CHECKS: tuple[Check, ...] = (
    Check("real_tokens", "correctness", real_tokens),
    Check("lossless", "correctness", lossless),
    Check("lossless_control", "correctness", lossless_control),
    Check("chain_control", "correctness", chain_control),
    Check("tree_against_chain", "performance", tree_against_chain),
    Check("batch_tokens", "correctness", batch_tokens),
    Check("batch_acceptance", "performance", batch_acceptance),
    Check("streaming", "correctness", streaming),
    Check("sampling", "correctness", sampling),
    Check("self_check", "correctness", self_check),
    Check("acceptance_length", "performance", acceptance_length),
    Check("tokens_per_second", "performance", tokens_per_second),
    Check("many_requests", "correctness", many_requests),
    Check("metrics", "correctness", metrics_agree),
)
