"""Batched plain decoding, for the drafter's training text and for the evaluation's continuations."""

from __future__ import annotations

import torch
from torch import Tensor

from training.modules import Rope, Target


@torch.inference_mode()
def continue_rows(
    target: Target,
    prompts: Tensor,
    prompt_lengths: Tensor,
    length: int,
    temperature: float,
    table: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Continue every prompt to ``length`` tokens; end-of-text is a token like any other.

    Args:
        target: The model; its dtype is the cache's.
        prompts: int64 [B, P], of which the first ``prompt_lengths`` of each row count.
        prompt_lengths: int64 [B], each at least 1.
        length: Tokens a row in all.
        temperature: 0 for greedy.
        table: As ``rope_table`` gives it.
        generator: Source of the samples.

    Returns:
        int64 [B, length].
    """
    dims, batch = target.dims, len(prompts)
    cache = torch.zeros(
        dims.layers, 2, batch, dims.kv_heads, length, dims.head_dim,
        device=prompts.device, dtype=target.embed_tokens.weight.dtype,
    )  # fmt: skip
    rows = torch.zeros(batch, length, dtype=torch.int64, device=prompts.device)
    rows[:, : prompts.shape[1]] = prompts[:, :length]
    given = torch.arange(length, device=prompts.device) < prompt_lengths[:, None]
    shortest = int(prompt_lengths.min())
    for position in range(length - 1):
        cos, sin = table[0][position : position + 1], table[1][position : position + 1]
        x = target.embed_tokens(rows[:, position : position + 1])
        for index, layer in enumerate(target.layers):
            x = layer.decode(x, Rope(cos, sin, cos, sin), cache[index, 0], cache[index, 1], position)
        if position + 1 < shortest:
            continue
        logits = target.logits(target.norm(x))[:, 0]
        chosen = choose(logits, temperature, generator)
        rows[:, position + 1] = torch.where(given[:, position + 1], rows[:, position + 1], chosen)
    return rows


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Most likely token, or a sample at ``temperature`` (Gumbel maximum): [B, vocab] -> int64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits / temperature - noise).argmax(-1)
