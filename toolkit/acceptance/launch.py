"""Level `full` as programs: measure one launch, or hold the launches against the release's report.

    python -m toolkit.acceptance.launch measure --report R --settings FILE --out FILE
    python -m toolkit.acceptance.launch compare --report R --launch dflash=M --launch chain=M ... --out FILE

Exit status: 0 measured or accepted, 1 refused, 2 unusable arguments or a server that does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.acceptance.measurement import (
    Measurement,
    compare_reports,
    measure,
    measurement_from_json,
    with_results,
)
from toolkit.acceptance.report import load_report, write_json
from toolkit.acceptance.settings import load_settings
from toolkit.errors import ConfigError, ToolkitError

_LAUNCHES = ("dflash", "chain")
# Both comparisons of tokens must have been made; acceptance lengths are compared where they are told.
_REQUIRED = ("relaunched_chain", "linear_dflash")


def _measure(arguments: argparse.Namespace) -> int:
    measured = measure(load_settings(arguments.settings), reference=load_report(arguments.report))
    write_json(arguments.out, measured.to_json())
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    launches = dict(item.split("=", 1) for item in arguments.launch if "=" in item)
    absent = [name for name in _LAUNCHES if name not in launches]
    if absent:
        raise ConfigError(f"--launch {absent[0]}=FILE is missing")
    report = load_report(arguments.report)
    measured = [_load(Path(launches[name])) for name in _LAUNCHES]
    results = compare_reports(report, *measured)
    for result in results:
        line = {"event": "result", "name": result.name, "status": result.status, "detail": result.detail}
        sys.stdout.write(json.dumps(line) + "\n")
    judged = with_results(report, results, required=_REQUIRED)
    write_json(arguments.out, judged.to_json())
    return 0 if judged.accepted else 1


def _load(path: Path) -> Measurement:
    try:
        return measurement_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ToolkitError(f"{path}: no measurement: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's description."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.acceptance.launch")
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("--report", type=Path, required=True, help="the release's report")
    parser.add_argument("--launch", action="append", default=[], help="NAME=FILE of a measured launch")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    try:
        return _measure(arguments) if arguments.action == "measure" else _compare(arguments)
    except ToolkitError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
