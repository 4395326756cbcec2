"""Durations and sizes as people write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1} | {
    unit: base**power
    for base, form in ((1000, "{}B"), (1024, "{}iB"))
    for power, unit in ((i + 1, form.format(letter)) for i, letter in enumerate("KMGT"))
}
_NUMBER_UNIT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*$")


def _parse(value: Any, units: dict[str, Any], what: str, example: str) -> Any:
    if not isinstance(value, str):
        return value
    match = _NUMBER_UNIT.match(value)
    if match is None or match[2] not in units:
        raise ValueError(f"is no {what}: write a number with a unit of {', '.join(units)}, such as {example}")
    return float(match[1]) * units[match[2]]


def parse_duration(value: Any) -> Any:
    """Seconds of a duration such as `90s`, `20m` or `2h`; anything but text is passed on."""
    return _parse(value, _SECONDS, "duration", "90s")


def parse_size(value: Any) -> Any:
    """Bytes of a size such as `512MiB` or `12GB`; anything but text is passed on."""
    parsed = _parse(value, _BYTES, "size", "512MiB")
    return int(parsed) if isinstance(parsed, float) else parsed


Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
