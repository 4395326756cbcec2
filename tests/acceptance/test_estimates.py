"""Figures against hand-worked values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.acceptance.estimates import Estimate, distinct_bigrams, paired_difference, percentile, ratio


def test_ratio_of_sums_and_its_error():
    # R = 12/4 = 3; residuals 6-3*1 = 3... worked by hand: a = (8, 4), b = (2, 2), residuals 2 and -2.
    estimate = ratio([(8, 2), (4, 2)])
    assert estimate.value == 3
    assert estimate.standard_error == pytest.approx(math.sqrt(2 / 1 * 8) / 4)


def test_ratio_is_not_the_mean_of_ratios():
    assert ratio([(10, 1), (10, 9)]).value == 2


def test_ratio_of_one_prompt_has_no_error():
    assert ratio([(6, 2)]) == Estimate(3.0, None)


def test_ratio_without_steps_is_none():
    assert ratio([]) is None
    assert ratio([(3, 0)]) is None


def test_paired_difference():
    estimate = paired_difference([3, 5, 7], [1, 2, 3])
    assert estimate.value == 3
    assert estimate.standard_error == pytest.approx(1 / math.sqrt(3))


@given(st.lists(st.floats(1, 8), min_size=2, max_size=20), st.floats(-2, 2))
def test_a_constant_shift_has_no_error(lengths, shift):
    estimate = paired_difference([x + shift for x in lengths], lengths)
    assert estimate.value == pytest.approx(shift, abs=1e-9)
    assert estimate.standard_error == pytest.approx(0, abs=1e-6)


def test_percentiles_are_nearest_rank():
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7], 0.5) == 7


def test_distinct_bigrams_counts_repetition():
    assert distinct_bigrams([[1, 2, 1, 2, 1]]) == 0.5
    assert distinct_bigrams([[1, 2, 3]]) == 1.0
    assert distinct_bigrams([[1]]) is None
