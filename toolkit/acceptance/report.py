"""The acceptance report: what was found, and the verdict."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.acceptance.result import CheckResult
from toolkit.errors import ToolkitError

SCHEMA = 1

Verdict = Literal["accepted", "refused"]


@dataclass(frozen=True, slots=True)
class Report:
    """One acceptance run.

    Attributes:
        verdict: `accepted` or `refused`.
        reasons: why it is refused, one sentence each.
        correctness_failed: whether the server gives wrong answers, or did not show that it does not.
        performance_failed: whether it is slower or accepts less than it must.
        mode: "acceptance" or "experiment" (performance does not refuse).
        level: "quick" or "full".
        started: UTC time, ISO 8601.
        seconds: time of the whole run.
        server: what was faced; no secret.
        checks: results in the order in which they ran.
        acceptance_length: `tree` and `chain`, each with `value`, `standard_error` and `histogram` (verify
            steps by matched draft tokens), or None; `distinct_bigrams` of the outputs.
        tokens_per_second: under load, or None.
        latency: seconds of one request under load and to the first token, by percentile.
        load: requests, concurrency, tokens and compared tokens of the run.
        prompts: number and SHA-256 of the prompts.
        outputs: token ids by run, for comparison with other launches of the same model.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    correctness_failed: bool
    performance_failed: bool
    mode: str
    level: str
    started: str
    seconds: float
    server: dict[str, Any]
    checks: tuple[CheckResult, ...]
    acceptance_length: dict[str, Any] = field(default_factory=dict)
    tokens_per_second: float | None = None
    latency: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether the verdict is `accepted`."""
        return self.verdict == "accepted"

    def check(self, name: str) -> CheckResult | None:
        """The result of one check by name."""
        return next((result for result in self.checks if result.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """JSON-safe form; `schema` is its version, `digest` tells whether it was changed since."""
        told = {"schema": SCHEMA} | asdict(self)
        return told | {"digest": _digest(told)}


def report_from_json(data: Any) -> Report:
    """Read a report back.

    Raises:
        ToolkitError: it is no report, or one of a newer schema.
    """
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise ToolkitError("this is no acceptance report: it has no schema number")
    if data["schema"] > SCHEMA:
        raise ToolkitError(
            f"the acceptance report has schema {data['schema']}, this version reads up to {SCHEMA}",
            hint="use the ddtoolkit that wrote it, or a newer one",
        )
    fields = {key: value for key, value in data.items() if key not in ("schema", "digest")}
    try:
        fields["checks"] = tuple(CheckResult(**item) for item in fields["checks"])
        fields["reasons"] = tuple(fields["reasons"])
        return Report(**fields)
    except (KeyError, TypeError) as error:
        raise ToolkitError(f"the acceptance report is damaged: {error}") from None


def is_changed(data: dict[str, Any]) -> bool:
    """Whether a report's JSON form is not as it was written; one without a digest counts as it is."""
    return "digest" in data and data["digest"] != _digest(data)


def _digest(data: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of all but the digest, in hexadecimal."""
    told = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_report(path: Path) -> Report:
    """Read a report file; raises ToolkitError as `report_from_json` does, naming the file."""
    try:
        return report_from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from None
    except ToolkitError as error:
        raise ToolkitError(f"{path}: {error}", hint=error.hint) from None
    except (ValueError, RecursionError):
        raise ToolkitError(f"{path}: is not JSON") from None


def judge(
    results: Sequence[CheckResult], *, required: Sequence[str], experiment: bool, fault: str | None
) -> tuple[Verdict, tuple[str, ...], bool, bool]:
    """Verdict, its reasons, and whether correctness and performance failed.

    Args:
        results: what the checks found.
        required: checks that must have passed.
        experiment: performance does not refuse.
        fault: what ended the run early (no answer, time limit); refuses always.
    """
    told = [result for result in results if fault is None or result.detail != fault]
    failed = [result for result in told if result.status == "failed"]
    unshown = [r for r in told if r.name in required and r.status not in ("passed", "failed")]
    correctness = [_sentence(r) for r in failed if r.category == "correctness"]
    correctness += [f"{r.name} is required and {r.status.replace('_', ' ')}: {r.detail}" for r in unshown]
    performance = [_sentence(r) for r in failed if r.category == "performance"]
    reasons = ([fault] if fault else []) + correctness + ([] if experiment else performance)
    return (
        "refused" if reasons else "accepted",
        tuple(dict.fromkeys(reasons)),
        bool(correctness or fault),
        bool(performance),
    )


def _sentence(result: CheckResult) -> str:
    return f"{result.name}: {result.detail or f'expected {result.expected}, found {result.measured}'}"


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that a reader finds the old file or the new one, never a part.

    Raises:
        ToolkitError: the folder is missing, not writable or full; nothing is left behind.
    """
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ToolkitError(f"{path}: cannot be written: {error.strerror}") from None
