"""Run the acceptance against a served endpoint.

    python -m toolkit.acceptance.run --settings FILE --out FILE [--progress-file FILE] [--picture FILE]

Progress goes to standard output (or the progress file), one JSON object a line; the table for people to
standard error. Exit status: 0 accepted, 1 refused, 2 unusable settings.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from toolkit.acceptance.checks import CHECKS, Check
from toolkit.acceptance.endpoint import Endpoint, EndpointError, TimeUpError
from toolkit.acceptance.estimates import Estimate, distinct_bigrams, percentile
from toolkit.acceptance.prompts import load_prompts, prompts_hash
from toolkit.acceptance.report import Report, judge, write_json
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.session import Run, Session
from toolkit.acceptance.settings import Settings, load_settings
from toolkit.errors import ConfigError, ToolkitError

Progress = Callable[[dict[str, Any]], None]

EXIT_ACCEPTED, EXIT_REFUSED, EXIT_SETTINGS = 0, 1, 2


def run_acceptance(settings: Settings, on_progress: Progress | None = None) -> Report:
    """Run every check that the server allows.

    Args:
        settings: what to do; see `settings_for` for a profile's.
        on_progress: called with one JSON-safe event before and after each check.

    Returns:
        The report. A server that does not answer, or stops doing so, is a refusal, not an exception.

    Raises:
        ConfigError: the settings cannot be used: prompts, keys or URL.
    """
    tell = on_progress or (lambda _: None)
    prompts = load_prompts(None if settings.prompts is None else Path(settings.prompts))
    started, clock = datetime.now(UTC), time.monotonic()
    with _endpoint(settings, clock) as endpoint:
        session = Session(endpoint, settings, prompts)
        results, fault = _run_checks(session, tell)
        verdict, reasons, correctness, performance = judge(
            results,
            required=settings.required,
            experiment=settings.mode == "experiment",
            fault=fault,
        )
        report = Report(
            verdict=verdict,
            reasons=reasons,
            correctness_failed=correctness,
            performance_failed=performance,
            mode=settings.mode,
            level=settings.level,
            started=started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - clock, 3),
            server=_server(session),
            checks=tuple(results),
            prompts={"count": len(prompts), "sha256": prompts_hash(prompts)},
            load={
                "requests": settings.requests,
                "concurrency": settings.concurrency,
                "tokens": settings.load_tokens,
                "compared_tokens": settings.max_new_tokens,
            },
            **_figures(session),
        )
    tell({"event": "verdict", "verdict": report.verdict, "reasons": list(report.reasons)})
    return report


def _endpoint(settings: Settings, clock: float) -> Endpoint:
    keys = {}
    for name in ("api_key", "admin_api_key"):
        reference = getattr(settings, name)
        if reference is not None:
            from toolkit.profile.secrets import resolve_secret

            keys[name] = resolve_secret(reference).reveal()
    try:
        return Endpoint(
            settings.url,
            api_key=keys.get("api_key"),
            admin_api_key=keys.get("admin_api_key"),
            request_timeout=settings.request_timeout,
            deadline=clock + settings.time_limit,
        )
    except ConfigError:
        raise
    except ToolkitError as error:
        raise ConfigError(str(error), hint=error.hint) from None


def _run_checks(session: Session, tell: Progress) -> tuple[list[CheckResult], str | None]:
    """Results of all checks, and what ended them early, if anything did."""
    results: list[CheckResult] = []
    fault: str | None = None
    try:
        session.endpoint.detect()
        session.checkpoint()
    except ToolkitError as error:
        fault = _in_words(error, session)
    for check in CHECKS:
        if fault is not None:
            results.append(CheckResult(check.name, "not_checked", check.category, detail=fault))
            continue
        tell({"event": "check", "name": check.name})
        result, fault = _run_check(check, session)
        results.append(result)
        tell({"event": "result", "name": result.name, "status": result.status, "detail": result.detail})
    return results, fault


def _run_check(check: Check, session: Session) -> tuple[CheckResult, str | None]:
    start = time.monotonic()
    fault: str | None = None
    try:
        result = check.run(session)
    except TimeUpError as error:
        fault = _in_words(error, session)
        result = CheckResult(check.name, "not_checked", check.category, detail=fault)
    except EndpointError as error:
        if not error.refused:
            fault = _in_words(error, session)
        result = CheckResult(check.name, "failed", check.category, detail=str(error))
    return replace(result, seconds=round(time.monotonic() - start, 3)), fault


def _in_words(error: ToolkitError, session: Session) -> str:
    if isinstance(error, TimeUpError):
        return f"the time limit of {session.settings.time_limit:g} s was reached before every check was made"
    after = f" after {session.answered} answered requests" if session.answered else ""
    return f"{error}{after}"


def _server(session: Session) -> dict[str, Any]:
    identity = session.identity
    return {
        "url": session.endpoint.url,
        "kind": identity.kind,
        "version": identity.version,
        "model": identity.model,
        "algorithm": session.algorithm,
        "block_size": session.block_size,
        "budget": identity.budget or session.settings.budget,
        "topk_cap": identity.topk_cap or session.settings.topk_cap,
        "dtype": session.dtype,
    }


def _figures(session: Session) -> dict[str, Any]:
    """Figures of the runs that were made; a run that was not is left out."""
    made = {
        name: run for name in ("alone", "batch", "chain", "loaded") if (run := session.__dict__.get(name))
    }
    outputs = {
        name: [list(output.tokens) for output in run.outputs]
        for name, run in made.items()
        if name != "loaded" and run.outputs is not None
    }
    loaded = made.get("loaded")
    bigrams = distinct_bigrams(outputs.get("batch", []))
    return {
        "acceptance_length": {
            "tree": _length(made.get("batch")),
            "chain": _length(made.get("chain")),
            "distinct_bigrams": None if bigrams is None else round(bigrams, 4),
        },
        "tokens_per_second": round(loaded.tokens / loaded.seconds, 2) if loaded and loaded.tokens else None,
        "latency": {} if loaded is None else _latency(loaded),
        "outputs": outputs,
    }


def _length(run: Run | None) -> dict[str, Any] | None:
    estimate: Estimate | None = run.acceptance_length if run else None
    if run is None or estimate is None:
        return None
    histogram: list[int] = []
    for answer in run.answers:
        counts = answer.correct_drafts or ()
        histogram += [0] * (len(counts) - len(histogram))
        for i, count in enumerate(counts):
            histogram[i] += count
    return {
        "value": round(estimate.value, 4),
        "standard_error": None if estimate.standard_error is None else round(estimate.standard_error, 4),
        "steps": int(sum(steps for _, steps in run.steps or [])),
        "histogram": histogram,
    }


def _latency(run: Run) -> dict[str, float]:
    seconds = [answer.seconds for answer in run.answers]
    return {f"p{share * 100:.0f}": round(percentile(seconds, share), 4) for share in (0.5, 0.9, 0.99)}


@dataclass(slots=True)
class _Lines:
    """Writes progress as JSON lines; a reader that is gone, or a full disk, never ends the acceptance."""

    file: TextIO
    broken: bool = field(default=False)

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
        except ToolkitError as error:
            sys.stderr.write(f"{error}\n" + (f"{error.hint}\n" if error.hint else ""))
            return EXIT_SETTINGS
    from toolkit.acceptance.table import print_report

    print_report(report)
    return EXIT_ACCEPTED if report.accepted else EXIT_REFUSED


def _open_progress(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
