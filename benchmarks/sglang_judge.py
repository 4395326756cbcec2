"""Tells whether greedy tokens are those of plain decoding, by a float32 forward of the target.

A token that is not the target's choice passes only as a near-tie, within delta = 2^(floor(log2 |z|) - 5) of
its greatest logit z, and at no more than 1% of positions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


class Judge:
    """Holds the target in float32, on the GPU where there is one.

    Args:
        target: its checkpoint.
    """

    def __init__(self, target: Path) -> None:
        import torch
        from safetensors.torch import load_file

        from toolkit.ddtree.models.config import read_target_config

        self.config = read_target_config(target)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        weights = load_file(target / "model.safetensors")
        self.weights = {name: value.to(self.device, torch.float32) for name, value in weights.items()}

    def differences(self, prompt: list[int], output: list[int]) -> tuple[int, int]:
        """Positions where the output is not the target's choice, and those of them that are no near-ties."""
        import torch

        from toolkit.ddtree.models.reference import target_forward

        with torch.inference_mode(), torch.device(self.device):
            logits, _ = target_forward(self.config, self.weights, [*prompt, *output])
            rows = logits[len(prompt) - 1 : -1]
            best = rows.max(-1).values
            gaps = best - rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        deltas = torch.exp2(torch.floor(torch.log2(best.abs().clamp(min=1e-6))) - 5)
        return int((gaps > 0).sum()), int((gaps > deltas).sum())

    def verdict(self, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
        """Judge outputs: positions, near-ties, wrong tokens, and whether they count as lossless."""
        found = [self.differences(prompt, output) for prompt, output in zip(prompts, outputs, strict=False)]
        positions = sum(map(len, outputs))
        near, wrong = sum(near for near, _ in found), sum(wrong for _, wrong in found)
        return {
            "positions": positions,
            "near_ties": near - wrong,
            "wrong": wrong,
            "lossless": wrong == 0 and near <= math.ceil(positions / 100),
        }

    def fails_one_replaced_token(self, prompt: list[int], output: list[int]) -> bool:
        """Whether it sees one replaced token."""
        changed = list(output)
        changed[len(changed) // 2] = (changed[len(changed) // 2] + 1) % self.config.vocab_size
        return not self.verdict([prompt], [changed])["lossless"]
