"""The pair's model card, from the record of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("card_template.md")
MODES = {
    "dflash": "DFLASH, block 8",
    "ddtree_7": "DDTREE, budget 7",
    "ddtree_16": "DDTREE, budget 16",
    "ddtree_32": "DDTREE, budget 32",
    "transition_7": "DDTREE transition, budget 7",
    "transition_16": "DDTREE transition, budget 16",
    "transition_32": "DDTREE transition, budget 32",
}
SETTINGS = {
    "held_out_greedy": "held out, greedy",
    "held_out_temperature_1": "held out, temperature 1",
    "held_out_long_greedy": "held out, long prompts, greedy",
    "trained_on_greedy": "trained on, greedy",
}


def save_card(path: Path, record: dict[str, Any]) -> None:
    """Write the model card; ``record`` is what ``train_pair.py`` writes to ``bundled_pair.json``."""
    filled = TEMPLATE.read_text(encoding="utf-8").format(
        **record,
        held_out=", ".join(record["text"]["held_out_packages"]),
        acceptance_table=acceptance_table(record["acceptance_length"]),
        million_tokens=record["text"]["train_tokens"] / 1e6,
        million_seen=record["target"]["tokens_seen"] / 1e6,
        million_apart=record["apart"]["tokens"] / 1e6,
    )
    path.write_text(filled, encoding="utf-8")


def acceptance_table(measured: dict[str, dict[str, float]]) -> str:
    """Markdown table of acceptance length by mode and setting, with the distinct-bigram ratio last."""
    rows = [["mode", *SETTINGS.values()], ["---"] * (len(SETTINGS) + 1)]
    for mode, label in MODES.items():
        rows.append([label, *(f"{measured[setting][mode]:.2f}" for setting in SETTINGS)])
    ratios = (f"{measured[setting]['distinct_bigram_ratio']:.2f}" for setting in SETTINGS)
    rows.append(["distinct bigrams / bigrams", *ratios])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
