"""The report as a table that fits the terminal, or as whole lines elsewhere."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from toolkit.acceptance.report import Report
from toolkit.acceptance.result import CheckResult
from toolkit.visible import visible

_STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow", "not_judged": "yellow"}

# How the probes of the check `lossless` were kept from the K/V that they judge, by the report's word for it.
_ISOLATION = {
    "salt": "probes under a cache salt of their own, so that none met the cached K/V of what they judge",
    "flush": "the prefix cache emptied before the probes, so that none met the cached K/V of what they judge",
}


def print_report(report: Report, file: TextIO | None = None, *, reasons: bool = True) -> None:
    """Print the checks, the figures and the verdict.

    Args:
        report: the report.
        file: where to; None: standard error.
        reasons: also print why it was refused; to be left out where that is said anyway.
    """
    console = Console(file=file or sys.stderr, highlight=False)
    server = report.server
    name = f"{server.get('kind')} {server.get('version')}, {server.get('model')}"
    lines = [
        Text(f"Acceptance of {server.get('url')} ({name})"),
        *_table(report, console.width if console.is_terminal else None),
        *map(Text, _figures(report)),
        Text(f"{report.verdict} in {report.seconds:.1f} s", style="green" if report.accepted else "bold red"),
        *(Text(f"  {reason}") for reason in report.reasons if reasons),
    ]
    for line in lines:
        line.plain = visible(line.plain)
        console.print(line, soft_wrap=True)


def _table(report: Report, width: int | None) -> Iterator[Text]:
    """A line a check; with a width, what does not fit in it goes on below."""
    column = max((len(check.name) for check in report.checks), default=5)
    yield Text(f"{'check':<{column}}  {'result':<12} {'s':>5}  found", style="bold")
    for check in report.checks:
        line = Text.assemble(
            f"{check.name:<{column}}  ",
            (f"{check.status.replace('_', ' '):<12}", _STYLES.get(check.status, "dim")),
            f" {check.seconds:5.1f}  ",
        )
        found = _found(check)
        if check.uncounted(report.mode):
            found = f"not counted, since this is an experiment; {found}"
        if width is None or line.cell_len + cell_len(found) <= width:
            yield line.append(found)
        else:
            line.rstrip()
            yield line
            yield from (Text(f"    {part}") for part in textwrap.wrap(found, max(width - 4, 20)))


def _found(check: CheckResult) -> str:
    """One line: figures where all is well, else what is wrong and what was expected."""
    parts = [check.detail] if check.detail else []
    if check.status == "passed" or not check.detail:
        parts.insert(0, _in_words(check.measured))
    if check.status == "failed" and check.expected:
        parts.append(f"expected: {check.expected}")
    return "; ".join(part for part in parts if part)


def _in_words(measured: Any) -> str:
    if isinstance(measured, dict) and (kept := _ISOLATION.get(str(measured.get("isolation")))) is not None:
        return (
            f"{_in_words({name: value for name, value in measured.items() if name != 'isolation'})}, {kept}"
        )
    if not isinstance(measured, dict):
        return "" if measured is None else str(measured)
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in measured.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_in_words(value)})"
    if isinstance(value, list) and not value:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figures(report: Report) -> list[str]:
    lines = []
    for name in ("tree", "chain"):
        length = report.acceptance_length.get(name)
        if length:
            error = length["standard_error"]
            lines.append(
                f"acceptance length, {name}: {length['value']:.3f}"
                + ("" if error is None else f" (standard error {error:.3f})")
            )
    if report.tokens_per_second is not None:
        latency = ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in report.latency.items())
        load = report.load
        lines.append(f"{report.tokens_per_second:.0f} tokens/s at {load.get('concurrency')} at once")
        lines.append(f"latency of {load.get('tokens')} tokens: {latency}")
    return lines
