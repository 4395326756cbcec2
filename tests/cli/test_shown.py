"""What people are shown of changes: the history on a narrow terminal, and how a change ended."""

import json
from pathlib import Path

import pytest

from toolkit.acceptance.report import Report
from toolkit.cli.drift import _show as show_drifts
from toolkit.cli.history import show_entries, show_table
from toolkit.cli.progress import Lines, finish, show_report
from toolkit.cli.service import _show_lock
from toolkit.deploy.watch import describe_status
from toolkit.release.journal import Event
from toolkit.release.request import Outcome

NEW, OLD = "20261130T041200Z-1a2b3c4d", "20261130T031200Z-1a2b3c4d"


def entry(
    kind: str, outcome: str, release: str | None, *changes: tuple[str, object, object], **more: object
) -> dict:
    return {
        "id": "20261130T041200Z-aaaaaaaa",
        "base": None,
        "command": kind,
        "message": "",
        "reason": "",
        "seconds": {},
        "when": "2026-11-30T04:12:55+00:00",
        "who": "ann@desk",
        "kind": kind,
        "outcome": outcome,
        "release": release,
        "changes": [dict(zip(("key", "old", "new"), change, strict=True)) for change in changes],
        **more,
    }


def test_the_history_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [
        entry("experiment", "rollback_failed", OLD, ("speculative.budget", 16, 7)),
        entry("deploy", "committed", NEW),
        entry("stop", "committed", None),
    ]
    show_table({"entries": entries, "current": NEW, "kept": [OLD, NEW], "earlier": 4})
    shown = capsys.readouterr()
    assert shown.err == "4 earlier entries: -n 7 shows them\n"
    assert shown.out == (
        f"2026-11-30 04:12Z  {OLD}  experiment  rollback failed\n"
        "    by ann@desk\n"
        "    speculative.budget: 16 -> 7\n"
        f"2026-11-30 04:12Z  {NEW}  deploy      committed (current)\n"
        "    by ann@desk\n"
        f"2026-11-30 04:12Z  {'-':<25}  stop        committed\n"
        "    by ann@desk\n"
    )
    longest = f"2026-11-30 04:12Z  {NEW}  experiment  committed (current)"
    assert len(longest) <= 80


def test_the_history_tells_what_needed_nobody_and_what_has_no_diff(
    capsys: pytest.CaptureFixture[str],
) -> None:
    longer = entry("record", "committed", NEW, message=f"{NEW} goes on, an experiment that returns later")
    put = entry("record", "committed", NEW, ("service.keep_releases", 5, 9), message="put on record")
    returned = entry("return", "committed", OLD, ("speculative.budget", 7, 8))
    show_table({"entries": [longer, put, returned], "current": OLD, "kept": [OLD, NEW], "earlier": 0})
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")] == [
        "    by ann@desk",
        f"    {NEW} goes on, an experiment that returns later",
        "    by ann@desk",
        "    service.keep_releases: 5 -> 9",
        "    by itself, at the end of an experiment of ann@desk",
        "    speculative.budget: 7 -> 8",
    ]


def test_the_history_tells_why_a_change_was_undone(capsys: pytest.CaptureFixture[str]) -> None:
    reason = (
        "acceptance refused it: acceptance_length: 2.709 is not at least 3.022 (10% under the base's 3.357)"
    )
    long = "returning failed too: " + "x" * 300
    entries = [
        entry("swap", "rolled_back", NEW, reason=reason, message=f"{reason}; {OLD} serves again"),
        entry("swap", "rollback_failed", OLD, reason=long),
        entry("deploy", "not_started", NEW, message="written by an earlier version"),
        entry("deploy", "committed", OLD, message=f"{OLD} serves"),
    ]
    show_table({"entries": entries, "current": OLD, "kept": [OLD, NEW], "earlier": 0})
    shown = capsys.readouterr()
    whys = [line.strip() for line in shown.out.splitlines() if "why:" in line]
    assert whys[0] == f"why: {reason}"
    assert whys[1] == f"why: {long[:249]}…"
    assert whys[2:] == ["why: written by an earlier version"]
    assert shown.err == f"a reason was cut: --entry {OLD} shows it whole\n"

    show_entries({"entries": entries[1:2], "current": OLD, "kept": [], "earlier": 0})
    assert f"    why      {long}\n" in capsys.readouterr().out


def test_what_failed_in_an_experiment_is_told_as_not_counting(capsys: pytest.CaptureFixture[str]) -> None:
    said = "acceptance_length: 2.7 is not at least 3.0"
    found = {"entries": [entry("experiment", "committed", NEW, uncounted=[said])], "current": NEW}
    show_table({**found, "kept": [NEW], "earlier": 0})
    assert f"    failed, but not counted in an experiment: {said}\n" in capsys.readouterr().out
    show_entries(found)
    assert f"    failed   {said} (not counted in an experiment)\n" in capsys.readouterr().out
    accepted = {"verdict": "accepted", "started": "2026-11-30", "mode": "experiment", "not_counted": [said]}
    item = dict.fromkeys(("state", "since", "url", "release", "config", "experiment", "transaction", "lock"))
    rows = dict(describe_status({**item, "accepted": accepted, "warnings": [], "log": []}))
    assert rows["accepted"] == (
        "accepted by correctness alone (an experiment), 2026-11-30, "
        f"failed, but not counted in an experiment: {said}"
    )
    value = {"event": "result", "name": "acceptance_length", "status": "failed", "counts": False}
    Lines(verbose=False).event(Event("acceptance", "progress", "", data=value))
    assert "acceptance_length: failed, which does not count in an experiment\n" in capsys.readouterr().err


def refused(report: Path | None = None) -> Outcome:
    return Outcome(
        "rolled_back",
        f"acceptance refused it: too slow; {OLD} serves again",
        "swap",
        release=NEW,
        base=OLD,
        seconds={"downtime": 3.21},
        report=None if report is None else str(report),
    )


def test_a_refusal_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    refusal = Report("refused", ("too slow",), False, True, "acceptance", "quick", "", 2.0, {}, ())
    report.write_text(json.dumps(refusal.to_json()))
    show_report(refused(report))
    with pytest.raises(SystemExit) as ended:
        finish(refused(report))
    assert ended.value.code == 5
    shown = capsys.readouterr().err
    assert "refused in 2.0 s" in shown
    assert shown.count("too slow") == 1
    assert shown.endswith(f"{OLD} serves again (without a server for 3.2 s)\n")


def test_a_first_deploy_had_nothing_to_be_without(capsys: pytest.CaptureFixture[str]) -> None:
    finish(Outcome("committed", f"{NEW} serves", "deploy", release=NEW, seconds={"downtime": 3.21}))
    assert capsys.readouterr().err == f"deploy: committed: {NEW} serves\n"


@pytest.mark.parametrize(("gone", "words"), [(True, ", which is gone: the next change takes"), (False, "")])
def test_a_lock_whose_holder_is_gone_is_told_so(
    gone: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = {"who": "ann@desk", "since": 0.0, "command": "swap", "token": "abc", "gone": gone}
    _show_lock({"service": "one", "holder": holder, "transaction": None})
    shown = capsys.readouterr().out
    assert (words or ": swap (token abc)") in shown
    assert ("is gone" in shown) is gone


def test_brackets_and_colons_of_a_next_step_are_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `[debug]` is taken for a colour and left out, and `[/x]` for the end of one that never began."""
    monkeypatch.setenv("COLUMNS", "200")
    fix = "ddtoolkit deploy profile llm --set 'engine.extra_args=[debug]' --set 'description=[/x] :on:'"
    show_drifts("llm", [{"kind": "config", "subject": "description", "found": "[b] is deployed", "fix": fix}])
    shown = capsys.readouterr().out
    assert fix in shown
    assert "[b] is deployed" in shown
