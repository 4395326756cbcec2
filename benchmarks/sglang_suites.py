"""The engines that sglang_modes.py measures side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.sglang_engines import Mode

LINEAR = ("DFLASH", "DFLASH without plugin", "DFLASH with plugin", "DDTREE 7 cap 1")
SYNC_CHECK = "synchronisations"
DDTREE = "ddtree"
SUITES = ("small", "large", "few")


def modes(drafter: Path, suite: str) -> dict[str, Mode]:
    """Modes by name; `few` is `large` without what only compares: fewer engines share the host's cores."""
    draft = {"speculative_draft_model_path": str(drafter)}
    chain = {**draft, "speculative_algorithm": "DFLASH"}
    tree = {**draft, "speculative_algorithm": "DDTREE"}
    eager = {"cuda_graph_backend_decode": "disabled"}
    serial = {"disable_overlap_schedule": True}

    def limits(budget: int, cap: int, **more: str) -> dict[str, Any]:
        return {"budget": budget, "topk_cap": cap, **more}

    def grown(budget: int, **arguments: Any) -> Mode:
        return Mode({**tree, **arguments}, limits(budget, 8), (DDTREE,))

    watched = Mode(tree, limits(32, 8), (DDTREE, "ddtree_sync_check"))
    if suite == "small":
        return {
            "plain": Mode(),
            "DFLASH without plugin": Mode(chain),
            "DFLASH with plugin": Mode(chain, plugins=(DDTREE,)),
            "DDTREE 7 cap 1": Mode(tree, limits(7, 1), (DDTREE,)),
            "DDTREE 16 cap 8": grown(16),
            "DDTREE 32 cap 8": grown(32),
            "DDTREE 32 cap 8 without graphs": grown(32, **eager),
            SYNC_CHECK: watched,
        }
    few = {
        "plain": Mode(),
        "DFLASH": Mode(chain, plugins=(DDTREE,)),
        "DDTREE 7 cap 1": Mode(tree, limits(7, 1), (DDTREE,)),
        "DDTREE 32 cap 8": grown(32),
        "DDTREE 64 cap 8": grown(64),
        "DDTREE 32 cap 8 transition": Mode(tree, limits(32, 8, expansion="transition"), (DDTREE,)),
        "DDTREE 64 cap 8 transition": Mode(tree, limits(64, 8, expansion="transition"), (DDTREE,)),
    }
    if suite == "few":
        return few
    return few | {
        "DDTREE 16 cap 8": grown(16),
        "plain without overlap": Mode(serial),
        "DFLASH without overlap": Mode({**chain, **serial}, plugins=(DDTREE,)),
        "DDTREE 32 cap 8 without overlap": grown(32, **serial),
        "DFLASH without graphs": Mode({**chain, **eager}, plugins=(DDTREE,)),
        "DDTREE 32 cap 8 without graphs": grown(32, **eager),
        SYNC_CHECK: watched,
    }
