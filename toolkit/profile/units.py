"""Durations and sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_SECONDS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_BYTES = {"B": Decimal(1)} | {
    unit: Decimal(base**power)
    for base, form in ((1000, "{}B"), (1024, "{}iB"))
    for power, unit in ((i + 1, form.format(letter)) for i, letter in enumerate("KMGT"))
}
_WHOLE_SECONDS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_NUMBER_UNIT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,3})?)\s*([A-Za-z]+)")
_NUMBER = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,3})?")


def _parse(text: str, units: dict[str, Decimal], what: str, example: str) -> Decimal:
    if text.strip() == "0":
        return Decimal(0)
    match = _NUMBER_UNIT.fullmatch(text.strip())
    if match is not None and match[2] in units:
        return Decimal(match[1]) * units[match[2]]
    if _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"has no unit: write a {what} such as {example} (units: {', '.join(units)})")
    raise ValueError(f"is no {what}: write a number and a unit of {', '.join(units)}, such as {example}")


def parse_duration(value: Any) -> Any:
    """Seconds (float) of a duration such as `90s`, `20m` or `2h`; anything but text is passed on.

    Raises:
        ValueError: the text has no unit, an unknown one, or is no number.
    """
    return float(_parse(value, _SECONDS, "duration", "90s")) if isinstance(value, str) else value


def parse_size(value: Any) -> Any:
    """Bytes (int) of a size such as `512MiB` or `12GB`; anything but text is passed on.

    Raises:
        ValueError: the text has no unit, an unknown one, is no number, or is no whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    parsed = _parse(value, _BYTES, "size", "512MiB")
    if parsed != int(parsed):
        raise ValueError("is no whole number of bytes: write a size such as 512MiB")
    return int(parsed)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads as exactly `seconds`."""
    if seconds and seconds == int(seconds):
        return next(f"{int(seconds) // unit}{name}" for name, unit in _WHOLE_SECONDS if seconds % unit == 0)
    milliseconds = round(seconds * 1000)
    if seconds < 1 and milliseconds and milliseconds / 1000 == seconds:
        return f"{milliseconds}ms"
    return f"{Decimal(repr(seconds)).normalize():f}s"


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads as exactly `size` bytes."""
    exact = [f"{size // int(unit)}{name}" for name, unit in _BYTES.items() if size % unit == 0]
    return min(exact, key=len) if size else "0B"


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "duration-with-unit", "examples": ["90s"]}),
]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "size-with-unit", "examples": ["512MiB"]}),
]
