"""The report as a table on a terminal, or as plain text elsewhere."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.acceptance.report import Report
from toolkit.acceptance.result import CheckResult

_STYLES = {"passed": "green", "failed": "bold red", "inconclusive": "yellow", "not_judged": "yellow"}


def print_report(report: Report, file: TextIO | None = None) -> None:
    """Print the checks, the figures and the verdict (standard error unless a file is given)."""
    console = Console(file=file or sys.stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=file or sys.stderr, highlight=False, width=160, color_system=None)
    server = report.server
    name = f"{server.get('kind')} {server.get('version')}, {server.get('model')}"
    console.print(Text(f"Acceptance of {server.get('url')} ({name})"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "result", "found", "s"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for check in report.checks:
        table.add_row(
            Text(check.name.replace("_", " ")),
            Text(check.status.replace("_", " "), style=_STYLES.get(check.status, "dim")),
            Text(_found(check)),
            f"{check.seconds:.1f}",
        )
    console.print(table)
    for line in _figures(report):
        console.print(Text(line))
    console.print(
        Text(f"{report.verdict} in {report.seconds:.1f} s", style="green" if report.accepted else "bold red")
    )
    for reason in report.reasons:
        console.print(Text(f"  {reason}"))


def _found(check: CheckResult) -> str:
    """One line: figures where all is well, else what is wrong and what was expected."""
    parts = [check.detail] if check.detail else []
    if check.status == "passed" or not check.detail:
        parts.insert(0, _in_words(check.measured))
    if check.status == "failed" and check.expected:
        parts.append(f"expected: {check.expected}")
    return "; ".join(part for part in parts if part)


def _in_words(measured: Any) -> str:
    if not isinstance(measured, dict):
        return "" if measured is None else str(measured)
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in measured.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_in_words(value)})"
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
        lines.append(
            f"{report.tokens_per_second:.0f} tokens/s at {load.get('concurrency')} at once; latency of "
            f"{load.get('tokens')} tokens: {latency}"
        )
    return lines
