"""Tells whether greedy tokens are those of plain decoding, by a float32 forward of the target.

A token that is not the target's choice passes only as a near-tie, within delta = 2^(floor(log2 |z|) - 5) of
its greatest logit z, and at no more than 1% of positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def verdict_of(judged: Iterable[tuple[Any, list[int]]]) -> dict[str, Any]:
    """Judge outputs by the target's logits.

    Args:
        judged: of each output its logits, float32 [tokens, vocabulary], and its tokens.

    Returns:
        Positions, near-ties, wrong tokens, and whether that counts as lossless.
    """
    import torch

    positions = near = wrong = 0
    for rows, output in judged:
        best = rows.max(-1).values
        gaps = best - rows.gather(1, torch.tensor(output, device=rows.device)[:, None])[:, 0]
        deltas = torch.exp2(torch.floor(torch.log2(best.abs().clamp(min=1e-6))) - 5)
        positions += len(output)
        near += int((gaps > 0).sum())
        wrong += int((gaps > deltas).sum())
    return {
        "positions": positions,
        "near_ties": near - wrong,
        "wrong": wrong,
        "lossless": wrong == 0 and near <= math.ceil(positions / 100),
    }


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

    def verdict(self, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
        """Judge outputs: positions, near-ties, wrong tokens, and whether they count as lossless."""
        return verdict_of(
            (self._rows(prompt, output), output) for prompt, output in zip(prompts, outputs, strict=False)
        )

    def _rows(self, prompt: list[int], output: list[int]) -> Any:
        """Logits of each output token's position, [tokens, vocabulary]."""
        import torch

        from toolkit.ddtree.models.reference import target_forward

        with torch.inference_mode(), torch.device(self.device):
            logits, _ = target_forward(self.config, self.weights, [*prompt, *output])
        return logits[len(prompt) - 1 : -1]

    def fails_one_replaced_token(self, prompt: list[int], output: list[int]) -> bool:
        """Whether it sees one replaced token."""
        changed = list(output)
        changed[len(changed) // 2] = (changed[len(changed) // 2] + 1) % self.config.vocab_size
        return not self.verdict([prompt], [changed])["lossless"]
