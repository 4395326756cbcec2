"""What modules of Ansible give as `diff`, as text."""

from typing import Any

import pytest

from toolkit.provision.differences import diff_text


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({}, ""),
        ({"diff": []}, ""),
        ({"diff": {"prepared": "+ figlet 2.2.5"}}, "+ figlet 2.2.5"),
        (
            {
                "diff": {
                    "before": "a\nb\n",
                    "after": "a\nc\n",
                    "before_header": "/etc/x",
                    "after_header": "new",
                }
            },
            "--- /etc/x\n+++ new\n@@ -1,2 +1,2 @@\n a\n-b\n+c",
        ),
        (
            {"diff": [{"before": None, "after": {"mode": "0755"}}]},
            '--- before\n+++ after\n@@ -0,0 +1,3 @@\n+{\n+ "mode": "0755"\n+}',
        ),
        (
            {
                "results": [
                    {"changed": False, "diff": {"before": "a", "after": "b"}},
                    {"changed": True, "diff": {"prepared": "only this"}},
                    "no mapping",
                ]
            },
            "only this",
        ),
    ],
)
def test_a_difference_is_a_unified_diff(result: dict[str, Any], said: str) -> None:
    assert diff_text(result) == said


def test_a_long_difference_is_cut_and_says_so() -> None:
    lines = diff_text({"diff": {"before": "", "after": "x\n" * 1000}}).splitlines()
    assert (len(lines), lines[-1]) == (201, "... 803 more lines")
