"""What the acceptance program came to, and the next step where it was no more than worse."""

import pytest

from toolkit.release.judge import Verdict


@pytest.mark.parametrize(
    ("accepted", "report", "told"),
    [
        (False, {"correctness_failed": False, "performance_failed": True}, True),
        (False, {"correctness_failed": True, "performance_failed": True}, False),
        (False, {"correctness_failed": True, "performance_failed": False}, False),
        (True, {"correctness_failed": False, "performance_failed": True}, False),
        (False, None, False),
        (False, {}, False),
    ],
)
def test_a_new_baseline_is_a_next_step_only_where_nothing_is_wrong(accepted, report, told):
    hint = Verdict(accepted, "refused", report).hint
    assert (hint is not None and "--new-baseline" in hint) == told
