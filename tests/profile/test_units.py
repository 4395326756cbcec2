"""Durations and sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.profile.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("20m", 1200.0),
        ("20min", 1200.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("250ms", 0.25),
        ("0", 0.0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("12GB", 12 * 10**9), ("1.5KiB", 1536), ("7B", 7), ("1 TiB", 1 << 40), ("0", 0)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["90", "90 S", "1h30m", "-1s", "s", "", "1e3s", "٣s", "1s\n2", "9999999999999999999s"]
)
def test_no_durations(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["512", "512M", "512mib", "0.1B", "1,5GB", "-1B"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(milliseconds=st.integers(0, 10**12))
def test_durations_come_back(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(size=st.integers(0, 1 << 50))
def test_sizes_come_back(size):
    assert parse_size(format_size(size)) == size


def test_numbers_pass():
    assert (parse_duration(90), parse_size(7)) == (90, 7)
