"""Lengths of time as people read them."""

from __future__ import annotations

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_FINE = 5 * _MINUTE  # below it seconds matter


def in_words(seconds: float) -> str:
    """A length of time, rounded, in at most two units: `39 s`, `2 min 5 s`, `12 min`, `2 h`, `3 d 4 h`.

    Args:
        seconds: less than none, as where a clock was set, counts as none.
    """
    left = max(round(seconds), 0)
    if left < _FINE:
        return _units(left, (_MINUTE, "min"), (1, "s"))
    minutes = round(left / _MINUTE) * _MINUTE
    if minutes < _DAY:
        return _units(minutes, (_HOUR, "h"), (_MINUTE, "min"))
    return _units(round(left / _HOUR) * _HOUR, (_DAY, "d"), (_HOUR, "h"))


def _units(left: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    """In two units, without one of which there is nothing."""
    count, rest = divmod(left, large[0])
    words = [f"{count} {large[1]}"] if count else []
    if rest or not count:
        words.append(f"{rest // small[0]} {small[1]}")
    return " ".join(words)
