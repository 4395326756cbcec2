"""The report for people: names as everywhere else, and lines that fit a terminal."""

import io

from toolkit.acceptance.report import Report
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.table import print_report

LONG = {"alone": {"positions": 512, "differences": 0}, "batch": {"positions": 1024, "differences": 0}}
REPORT = Report(
    verdict="refused",
    reasons=("tokens_per_second: 12 is not at least 20",),
    correctness_failed=False,
    performance_failed=True,
    mode="acceptance",
    level="full",
    started="2026-11-30T00:00:00+00:00",
    seconds=33.5,
    server={"url": "http://127.0.0.1:30000", "kind": "sglang", "version": "0.5.17", "model": "toy"},
    checks=(
        CheckResult("real_tokens", "passed", "correctness", measured={"prompts": 4}, seconds=0.5),
        CheckResult("relaunched_chain_acceptance", "passed", "correctness", measured=LONG, seconds=100.0),
        CheckResult("tokens_per_second", "failed", "performance", detail="12 is not enough " * 8 + "END"),
        CheckResult("metrics", "not_checked", "correctness", detail="no /metrics"),
    ),
    acceptance_length={"tree": {"value": 4.5, "standard_error": 0.1}},
    tokens_per_second=12345.0,
    latency={"p50": 12.345, "p90": 23.456, "p99": 34.567},
    load={"requests": 160, "concurrency": 1024, "tokens": 4096},
    prompts={},
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(file, **options):
    print_report(REPORT, file, **options)
    return file.getvalue()


def test_nothing_wraps_on_a_narrow_terminal(monkeypatch):
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    shown = printed(Terminal())
    assert max(map(len, shown.splitlines())) == 80
    assert "relaunched_chain_acceptance  passed       100.0  alone (positions 512" in shown
    assert shown.count("END\n") == 1  # what did not pass is told whole, below its line


def test_elsewhere_every_check_is_one_whole_line():
    shown = printed(io.StringIO())
    assert "batch (positions 1024, differences 0)\n" in shown
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [check.name for check in REPORT.checks]
    assert lines[4].endswith("END")
    assert "metrics                      not checked    0.0  no /metrics" in lines[5]


def test_reasons_are_left_out_where_they_are_said_anyway():
    reason = "  tokens_per_second: 12 is not at least 20\n"
    assert reason in printed(io.StringIO())
    assert reason not in printed(io.StringIO(), reasons=False)
