"""Level `full`: the same prompts on other launches of the same model, held against the tree's report.

The caller restarts the service (as linear DFLASH, then as the chain: budget block size - 1, cap 1) and takes
a `Measurement` at each; nothing is judged as an acceptance there. `compare_reports` then judges:
the relaunched chain equals the chain control by per-request limits, and linear DFLASH equals both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from toolkit.acceptance.checks.equality import delta, judged_figures, judgement_status
from toolkit.acceptance.figures import describe_server, length_of
from toolkit.acceptance.probing import Output, first_difference
from toolkit.acceptance.report import Report, judge
from toolkit.acceptance.result import CheckResult
from toolkit.acceptance.runner import open_session
from toolkit.acceptance.session import Session
from toolkit.acceptance.settings import Settings
from toolkit.errors import ToolkitError

TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one launch does with the 16 prompts of the batch.

    Attributes:
        server: what was faced.
        prompts: SHA-256 of the prompts.
        outputs: token ids by prompt; empty where the server tells none.
        acceptance_length: as `Report.acceptance_length["tree"]`, or None.
        tokens_per_second: of the 16 requests at once.
        judged: outputs that differ from the reference, held against plain decoding on this launch:
            `status` and figures; None without a difference.
        seconds: time it took.
    """

    server: dict[str, Any]
    prompts: str
    outputs: list[list[int]] = field(default_factory=list)
    acceptance_length: dict[str, Any] | None = None
    tokens_per_second: float | None = None
    judged: dict[str, Any] | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-safe form."""
        return asdict(self)


def measurement_from_json(data: Any) -> Measurement:
    """Read a measurement back; raises ToolkitError if it is none."""
    try:
        return Measurement(**data)
    except TypeError as error:
        raise ToolkitError(f"this is no measurement: {error}") from None


def measure(settings: Settings, *, reference: Report | None = None) -> Measurement:
    """Send the 16 prompts at once to one launch.

    Args:
        settings: as for an acceptance; `url` is the launch.
        reference: report of the tree; outputs that differ from its chain control are held against plain
            decoding while this launch serves.

    Raises:
        EndpointError: the launch does not answer.
        TimeUpError: the time limit is reached.
        ConfigError: the settings cannot be used.
    """
    start = time.monotonic()
    with open_session(settings) as session:
        session.endpoint.detect()
        run = session.batch
        outputs = run.outputs
        judged = None
        if reference is not None and outputs is not None and session.has_token_ids:
            judged = _judge(session, outputs, _reference_outputs(reference))
        return Measurement(
            server=describe_server(session),
            prompts=session.prompts_hash,
            outputs=[list(output.tokens) for output in outputs or []],
            acceptance_length=length_of(run),
            tokens_per_second=round(run.tokens / run.seconds, 2) if run.tokens else None,
            judged=judged,
            seconds=round(time.monotonic() - start, 3),
        )


def compare_reports(tree: Report, dflash: Measurement, chain: Measurement) -> list[CheckResult]:
    """Judge the launches of level `full`.

    Args:
        tree: report of the DDTREE release, with its chain control.
        dflash: the same prompts on a launch as linear DFLASH.
        chain: the same prompts on a launch as the chain.

    Returns:
        `relaunched_chain` and `linear_dflash`, each about tokens, and the same names with `_acceptance`.
        Tokens are equal by the near-tie rule, acceptance lengths within 1%.
    """
    results: list[CheckResult] = []
    control = tree.acceptance_length.get("chain")
    reference = _reference_outputs(tree)
    for name, launch in (("relaunched_chain", chain), ("linear_dflash", dflash)):
        results.append(_same_tokens(name, tree, reference, launch))
        results.append(_same_length(f"{name}_acceptance", control, launch.acceptance_length))
    return results


def with_results(report: Report, results: Sequence[CheckResult], *, required: Sequence[str] = ()) -> Report:
    """The report with further results, judged anew; an earlier refusal stands."""
    checks = (*report.checks, *results)
    verdict, reasons, correctness, performance = judge(
        results, required=required, experiment=report.mode == "experiment", fault=None
    )
    return replace(
        report,
        verdict="refused" if "refused" in (verdict, report.verdict) else "accepted",
        reasons=(*report.reasons, *reasons),
        correctness_failed=report.correctness_failed or correctness,
        performance_failed=report.performance_failed or performance,
        checks=checks,
    )


def _reference_outputs(report: Report) -> list[list[int]]:
    return report.outputs.get("chain") or report.outputs.get("batch") or []


def _judge(session: Session, outputs: list[Output], reference: list[list[int]]) -> dict[str, Any] | None:
    """Outputs that differ from the reference, from their first difference on, against plain decoding."""
    parts = [
        Output(output.prompt + output.tokens[:place], output.tokens[place:])
        for output, tokens in zip(outputs, reference, strict=False)
        if (place := first_difference(output.tokens, tokens)) is not None and place < len(output.tokens)
    ]
    if not parts:
        return None
    if session.isolation == "none":
        return {"status": "inconclusive"}
    judged = session.decoder.judge(parts, delta=delta(session), start=0)
    judgement = replace(judged, positions=sum(len(output.tokens) - 1 for output in outputs))
    return {"status": judgement_status(session, judgement)} | judged_figures(session, judgement)


def _same_tokens(name: str, tree: Report, reference: list[list[int]], launch: Measurement) -> CheckResult:
    expected = "the tokens of the chain control by per-request limits"
    if launch.prompts != tree.prompts.get("sha256"):
        return CheckResult(name, "not_checked", expected=expected, detail="measured on other prompts")
    if not reference or not launch.outputs:
        return CheckResult(name, "not_checked", expected=expected, detail="no token ids to compare")
    if [len(tokens) for tokens in reference] != [len(tokens) for tokens in launch.outputs]:
        detail = "the launch gave outputs of other lengths than the release"
        return CheckResult(name, "failed", expected=expected, detail=detail)
    different = sum(a != b for a, b in zip(reference, launch.outputs, strict=False))
    figures: dict[str, Any] = {"outputs": len(launch.outputs), "different": different}
    if not different:
        return CheckResult(name, "passed", measured=figures, expected=expected)
    judged = launch.judged or {"status": "failed"}
    return CheckResult(
        name,
        judged["status"],
        measured=figures | judged,
        expected=expected,
        detail="" if judged["status"] == "passed" else f"{different} outputs differ, not only by near-ties",
    )


def _same_length(name: str, control: dict[str, Any] | None, launch: dict[str, Any] | None) -> CheckResult:
    expected = "the acceptance length of the chain control, within 1%"
    if control is None or launch is None:
        detail = "no acceptance length of both to compare"
        return CheckResult(name, "not_checked", "performance", expected=expected, detail=detail)
    close = abs(control["value"] - launch["value"]) <= TOLERANCE * control["value"]
    return CheckResult(
        name,
        "passed" if close else "failed",
        "performance",
        measured={"chain_control": control["value"], "launch": launch["value"]},
        expected=expected,
        detail="" if close else "per-request limits and a launch with them do not do the same",
    )
