"""Figures of an acceptance run, in the form in which reports keep them."""

from __future__ import annotations

from typing import Any

from toolkit.acceptance.estimates import Estimate, distinct_bigrams, percentile
from toolkit.acceptance.session import Run, Session


def describe_server(session: Session) -> dict[str, Any]:
    """What was faced; holds no secret."""
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


def figures_of(session: Session) -> dict[str, Any]:
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
            "tree": length_of(made.get("batch")),
            "chain": length_of(made.get("chain")),
            "distinct_bigrams": None if bigrams is None else round(bigrams, 4),
        },
        "tokens_per_second": round(loaded.tokens / loaded.seconds, 2) if loaded and loaded.tokens else None,
        "latency": {} if loaded is None else _latency(loaded),
        "outputs": outputs,
    }


def length_of(run: Run | None) -> dict[str, Any] | None:
    """Acceptance length of a run: value, standard error, steps, and steps by matched draft tokens."""
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
