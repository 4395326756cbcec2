"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["passed", "failed", "not_checked", "inconclusive", "not_judged"]
Category = Literal["correctness", "performance"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found.

    Attributes:
        name: the check.
        status: `passed`; `failed`; `not_checked` (the server lacks what the check needs);
            `inconclusive` (tried, and the outcome shows neither); `not_judged` (measured, but other
            traffic or another base makes a judgement unfair).
        category: a correctness failure always refuses; a performance failure does so outside experiments.
        measured: figures found, JSON-safe.
        expected: what was expected, in words.
        detail: what this means, or why it was not checked, and the next step.
        seconds: time spent, requests that only this check needed included.
    """

    name: str
    status: Status
    category: Category = "correctness"
    measured: Any = None
    expected: str = ""
    detail: str = ""
    seconds: float = 0.0

    def uncounted(self, mode: str) -> bool:
        """Whether it failed and refuses nothing, since an experiment is judged by correctness alone."""
        return (self.status, self.category, mode) == ("failed", "performance", "experiment")
