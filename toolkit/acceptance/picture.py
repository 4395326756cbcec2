"""The report as a picture: matched draft tokens a step, tree against chain, and latency."""

from __future__ import annotations

from pathlib import Path

from toolkit.acceptance.report import Report
from toolkit.errors import ToolkitError


def draw(report: Report, path: Path) -> None:
    """Write `acceptance.png`: share of verify steps by matched draft tokens, and latency percentiles.

    Raises:
        ToolkitError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    steps, latency = figure.subplots(1, 2, width_ratios=(2, 1))
    for name, shift in (("tree", -0.2), ("chain", 0.2)):
        length = report.acceptance_length.get(name)
        if not length or not sum(length["histogram"]):
            continue
        total = sum(length["histogram"])
        places = [i + shift for i in range(len(length["histogram"]))]
        shares = [count / total for count in length["histogram"]]
        steps.bar(places, shares, width=0.4, label=f"{name}: acceptance length {length['value']:.2f}")
    if steps.patches:
        steps.legend()
    steps.set(xlabel="matched draft tokens", ylabel="share of verify steps", title="Verify steps")
    latency.bar(list(report.latency), [1000 * value for value in report.latency.values()], color="tab:gray")
    latency.set(ylabel="ms", title="Latency under load")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be written: {error.strerror}") from None
