"""Run the acceptance against a served endpoint.

    python -m toolkit.acceptance.run --settings FILE --out FILE [--progress-file FILE] [--picture FILE]

Progress goes to standard output (or the progress file), one JSON object a line; the table for people to
standard error. Exit status: 0 accepted, 1 refused, 2 unusable settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from toolkit.acceptance.report import Report, write_json
from toolkit.acceptance.runner import run_acceptance
from toolkit.acceptance.settings import load_settings
from toolkit.errors import ConfigError, ToolkitError

__all__ = ["main", "run_acceptance"]

EXIT_ACCEPTED, EXIT_REFUSED, EXIT_SETTINGS = 0, 1, 2


@dataclass(slots=True)
class _Lines:
    """Writes progress as JSON lines; a reader that is gone, or a full disk, never ends the acceptance."""

    file: TextIO
    broken: bool = False

    def __call__(self, event: dict[str, Any]) -> None:
        if self.broken:
            return
        try:
            self.file.write(
                json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds")} | event) + "\n"
            )
            self.file.flush()
        except (OSError, ValueError):
            self.broken = True


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.acceptance.run", description="Run the acceptance against a served endpoint."
    )
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with the settings")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument(
        "--progress-file", type=Path, help="where progress lines go instead of standard output"
    )
    parser.add_argument("--picture", type=Path, help="where a picture of the report goes, as PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's description."""
    arguments = _arguments(argv)
    with ExitStack() as stack:
        try:
            settings = load_settings(arguments.settings)
            target: TextIO = sys.stdout
            if arguments.progress_file is not None:
                target = stack.enter_context(_open_progress(arguments.progress_file))
            report = run_acceptance(settings, _Lines(target))
            write_json(arguments.out, report.to_json())
            if arguments.picture is not None:
                _draw(report, arguments.picture)
        except ToolkitError as error:
            sys.stderr.write(f"{error}\n" + (f"{error.hint}\n" if error.hint else ""))
            return EXIT_SETTINGS
    from toolkit.acceptance.table import print_report

    print_report(report)
    return EXIT_ACCEPTED if report.accepted else EXIT_REFUSED


def _draw(report: Report, path: Path) -> None:
    from toolkit.acceptance.picture import draw

    try:
        draw(report, path)
    except ToolkitError as error:  # a missing picture changes no verdict
        sys.stderr.write(f"{error}\n")


def _open_progress(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
