"""Lengths of time in words."""

import pytest

from toolkit.spans import in_words


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5.0, "0 s"),
        (0.4, "0 s"),
        (38.6, "39 s"),
        (59.7, "1 min"),
        (125.0, "2 min 5 s"),
        (725.0, "12 min"),
        (3599.0, "1 h"),
        (5400.0, "1 h 30 min"),
        (7199.0, "2 h"),
        (86000.0, "23 h 53 min"),
        (86399.0, "1 d"),
        (3 * 86400 + 4 * 3600 + 59.0, "3 d 4 h"),
    ],
)
def test_at_most_two_units_none_of_them_zero(seconds, expected):
    assert in_words(seconds) == expected
