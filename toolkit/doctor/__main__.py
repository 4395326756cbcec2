"""`python -m toolkit.doctor`: reads an examination, a JSON line, and answers with the report; runs on hosts.

It runs under the host's own Python with nothing installed. While it works, `{"beat": ...}` tells that it is
alive; the last line is an object with `changed` (always false), `report`, and for who has none of this code
`summary`, `failures` (a line each) and `refusal`: what a deploy would say, and its next step. With `actions`,
the steps of a plan, what these mend does not count. Names of no check end in `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from toolkit.doctor.catalogue import require_known
from toolkit.doctor.examine import examine
from toolkit.doctor.preflight import mended_by, refusal, summary_of
from toolkit.errors import ToolkitError

_BEAT = 5.0
_writing = threading.Lock()


def main() -> None:
    """Answer one request; what a program left behind that cannot be killed keeps nobody waiting."""
    examination = json.loads(sys.stdin.readline())
    threading.Thread(target=_beat, daemon=True).start()
    try:
        require_known(examination["ignored"])
        _tell(_answer(examination))
    except ToolkitError as error:
        _tell({"error": error.message, "hint": error.hint, "kind": type(error).__name__})
    os._exit(0)


def _answer(examination: dict[str, Any]) -> dict[str, Any]:
    passed_over = [*examination["ignored"], *mended_by(examination.get("actions", ()))]
    report = examine({**examination, "ignored": passed_over})
    why = refusal(report)
    return {
        "changed": False,
        "report": report.to_json(),
        "summary": summary_of(report),
        "failures": report.lines(),
        "refusal": None if why is None else [why.message, why.hint],
    }


def _beat() -> None:
    while not threading.Event().wait(_BEAT):
        _tell({"beat": 1})


def _tell(value: object) -> None:
    with _writing:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
