"""Acceptance length and its uncertainty, over independent prompts.

Acceptance length is tokens per verify step, bonus token included: of a request that generated `t`
tokens in `s` verify steps, `(t - 1) / s`, since the first token comes from the prefill. Over several
requests it is the ratio of the sums, as engines count it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its standard error.

    Attributes:
        value: the figure.
        standard_error: its standard error; None from fewer than two prompts.
    """

    value: float
    standard_error: float | None


def ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """Ratio of sums `sum(a) / sum(b)` over prompts, with the delta method's standard error.

    The error is `sqrt(n / (n - 1) * sum((a - R b)^2)) / sum(b)` (Cochran, Sampling Techniques, 3rd ed.,
    section 6.4). None when all `b` are 0.
    """
    total = sum(b for _, b in pairs)
    if total <= 0:
        return None
    value = sum(a for a, _ in pairs) / total
    n = len(pairs)
    if n < 2:
        return Estimate(value, None)
    spread = sum((a - value * b) ** 2 for a, b in pairs)
    return Estimate(value, math.sqrt(n / (n - 1) * spread) / total)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of `first[i] - second[i]` over prompts, with its standard error `s / sqrt(n)`.

    Pairing takes out what one prompt has in common in both runs, which is most of the spread.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    if n < 2:
        return Estimate(mean, None)
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    return Estimate(mean, math.sqrt(variance / n))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: the smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def distinct_bigrams(outputs: Sequence[Sequence[int]]) -> float | None:
    """Share of token bigrams that are different; text that repeats itself flatters acceptance."""
    bigrams = [pair for ids in outputs for pair in itertools.pairwise(ids)]
    return len(set(bigrams)) / len(bigrams) if bigrams else None
