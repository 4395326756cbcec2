"""The report for people: names as everywhere else, and lines that fit a terminal."""

import io
from dataclasses import replace

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


def printed(file, report=REPORT, **options):
    print_report(report, file, **options)
    return file.getvalue()


def narrow(monkeypatch):
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)


def test_nothing_is_cut_on_a_narrow_terminal(monkeypatch):
    narrow(monkeypatch)
    shown = printed(Terminal())
    assert max(map(len, shown.splitlines())) <= 80
    assert "real_tokens                  passed         0.5  prompts 4\n" in shown
    # What does not fit goes on below its line, whatever it came to.
    assert "relaunched_chain_acceptance  passed       100.0\n    alone (positions 512" in shown
    assert "1024, differences 0)\n" in shown
    assert shown.count("END\n") == 1


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


def test_what_a_program_reads_is_put_in_words():
    checks = (
        CheckResult("lossless", "passed", measured={"acceptance_length": 3.5, "isolation": "salt"}),
        CheckResult("self_check", "passed", measured={"items": 13, "failed": []}),
    )
    shown = printed(io.StringIO(), replace(REPORT, checks=checks))
    assert "acceptance length 3.5, probes under a cache salt of their own, so that none met " in shown
    assert "isolation" not in shown
    assert "items 13, failed none\n" in shown
    flushed = CheckResult("lossless", "passed", measured={"isolation": "flush", "acceptance_length": 3.5})
    assert "3.5, the prefix cache emptied before" in printed(
        io.StringIO(), replace(REPORT, checks=(flushed,))
    )


def test_what_fails_in_an_experiment_without_counting_says_so():
    trial = replace(REPORT, mode="experiment", verdict="accepted", reasons=())
    assert "not counted, since this is an experiment; 12 is not enough" in printed(io.StringIO(), trial)
    assert "not counted" not in printed(io.StringIO())
    wrong = replace(trial, checks=(CheckResult("lossless", "failed", "correctness", detail="wrong"),))
    assert "not counted" not in printed(io.StringIO(), wrong)


def test_what_a_server_calls_itself_moves_no_cursor():
    hostile = replace(REPORT, server=REPORT.server | {"model": "toy\x1b[2J"}, reasons=("\x1b]0;x\x07",))
    shown = printed(io.StringIO(), hostile)
    assert "(sglang 0.5.17, toy\ufffd[2J)" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
