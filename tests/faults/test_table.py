"""The committed result of the matrix, and the tables that docs/faults.md shows of it."""

import json
from pathlib import Path

import pytest

from tests.faults.points import FAULTS, Moment
from tests.faults.table import BEGIN, cell, left, tables, update

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "fault_matrix.json"
DOCUMENT = ROOT / "docs" / "faults.md"


@pytest.fixture(scope="module")
def data():
    return json.loads(RESULT.read_bytes())


def test_the_document_shows_the_committed_result():
    assert update(RESULT, DOCUMENT) == DOCUMENT.read_text(encoding="utf-8"), (
        "python scripts/fault_matrix.py --out benchmarks/fault_matrix.json --table docs/faults.md"
    )


def test_every_check_held(data):
    assert [run for run in data["runs"] if run["problems"]] == []


def test_what_is_left_to_do_is_said(data):
    missing = left(data)
    wanted = sum(
        Moment(**{key: value for key, value in item.items() if key != "key"}).takes(fault)
        for items in data["points"].values()
        for item in items
        for fault in FAULTS
    )
    assert len(missing) == wanted - len(data["runs"])
    said = f"{len(missing)} more are to be made" in DOCUMENT.read_text(encoding="utf-8")
    assert said == bool(missing)


@pytest.mark.parametrize("fault", ["reboot", "disk"])
def test_every_moment_of_a_swap_was_struck_on_the_host(data, fault):
    """What is left elsewhere must not be this: all changes go through the same transaction."""
    assert [moment.key for name, moment, missing in left(data) if (name, missing) == ("swap", fault)] == []


def test_a_failed_check_is_shown(data):
    runs = [dict(run) for run in data["runs"]]
    runs[0] |= {"problems": ["no tokens"]}
    shown = tables(data | {"runs": runs})
    assert "1 of them with a check that did not hold" in shown
    assert "**1 with a check that did not hold**" in shown


def test_a_cell_has_the_longest_time_of_each_end():
    run = {"problems": [], "serving": "old", "outcome": "rolled_back", "tokens_after": 1.26}
    begun = run | {"outcome": None, "tokens_after": 0.0}
    assert cell([run, run | {"tokens_after": 3.04}, begun]) == (
        "undone, the old release serves (2, 3.0 s); "
        "the old release serves on; the next command begins anew (1)"
    )
    assert cell([]) == "-"
    assert BEGIN in DOCUMENT.read_text(encoding="utf-8")
