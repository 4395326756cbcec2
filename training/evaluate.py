"""Acceptance length by replay, and how repetitive the target's text is.

Speculative decoding is lossless, so the committed text does not depend on the tree: the target's continuation
is made once by plain decoding, the drafter's marginals are computed at each of its positions, and every tree
shape is replayed against it. This is as exact for sampled continuations as for greedy ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from training.generate import continue_rows
from training.modules import Drafter, Target, draft_blocks

TREE_BUDGETS = (7, 16, 32)
TOPK_CAP = 8


@dataclass(frozen=True)
class Pair:
    """Both models and what it takes to run them together."""

    target: Target
    drafter: Drafter
    capture: tuple[int, ...]
    block_size: int
    mask_id: int
    table: tuple[Tensor, Tensor]


@torch.inference_mode()
def draft_candidates(pair: Pair, rows: Tensor, first: int, chunk: int = 32) -> tuple[Tensor, Tensor]:
    """Top candidates of each draft slot at every anchor from ``first`` on.

    Args:
        pair: The models.
        rows: int64 [n, T].
        first: First anchor position; the last is T - block_size.
        chunk: Anchors a forward.

    Returns:
        Tokens int64 and log-probabilities float32, both [n, anchors, block_size - 1, TOPK_CAP].
    """
    tokens, scores = [], []
    for part in rows.split(16):
        _, features = pair.target(part, pair.table, pair.capture)
        part_tokens, part_scores = [], []
        for anchors in torch.arange(first, rows.shape[1] - pair.block_size + 1, device=rows.device).split(
            chunk
        ):
            slots, positions, mask = draft_blocks(
                part, anchors.expand(len(part), -1), pair.block_size, pair.mask_id
            )
            hidden = pair.drafter(pair.target.embed_tokens(slots), features, positions, mask, pair.table)
            hidden = hidden.unflatten(1, (len(anchors), pair.block_size))[:, :, 1:]
            top = pair.target.logits(hidden).log_softmax(-1).topk(TOPK_CAP)
            part_tokens.append(top.indices)
            part_scores.append(top.values)
        tokens.append(torch.cat(part_tokens, 1))
        scores.append(torch.cat(part_scores, 1))
    return torch.cat(tokens), torch.cat(scores)


def best_first(scores: Sequence[Sequence[float]], budget: int) -> list[tuple[int, int, int]]:
    """The ``budget`` most probable prefixes under the product of the slots' marginals (arXiv 2604.12989).

    Args:
        scores: Log-probabilities by slot, each in descending order.
        budget: Nodes, the root not counted.

    Returns:
        (parent, depth, rank) of node 1, 2, ...; parent 0 is the root.
    """
    nodes: list[tuple[int, int, int]] = []
    heap = [(-scores[0][0], 1, 0, 0)]
    while heap and len(nodes) < budget:
        cost, depth, parent, rank = heapq.heappop(heap)
        nodes.append((parent, depth, rank))
        slot = scores[depth - 1]
        if rank + 1 < len(slot):
            heapq.heappush(heap, (cost + slot[rank] - slot[rank + 1], depth, parent, rank + 1))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], depth + 1, len(nodes), 0))
    return nodes


def replay(
    truth: list[int], tokens: list[list[list[int]]], scores: list[list[list[float]]], budget: int, cap: int
) -> tuple[int, int]:
    """Decode one continuation with trees of one shape.

    Args:
        truth: The continuation; its first token is the first bonus token.
        tokens: Candidates by anchor, slot and rank.
        scores: Their log-probabilities.
        budget: Nodes a tree.
        cap: Candidates a slot.

    Returns:
        Tokens committed and verify steps, over the steps that fit in the continuation.
    """
    position = steps = 0
    while position < len(tokens):
        nodes = best_first([slot[:cap] for slot in scores[position]], budget)
        children = {(p, tokens[position][d - 1][r]): i for i, (p, d, r) in enumerate(nodes, 1)}
        node = matched = 0
        while (node := children.get((node, truth[position + matched + 1]), 0)) != 0:
            matched += 1
            if position + matched + 1 == len(truth):
                break
        position += matched + 1
        steps += 1
    return position, steps


def distinct_bigram_ratio(row: Sequence[int]) -> float:
    """Share of a text's adjacent token pairs that are different pairs."""
    pairs = list(pairwise(row))
    return len(set(pairs)) / len(pairs)


def measure(pair: Pair, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> dict[str, float]:
    """Continue the prompts and replay linear DFLASH and DDTREE on the continuations.

    Args:
        pair: The models.
        prompts: int64 [n, P].
        new_tokens: Length of each continuation.
        temperature: 0 for greedy.
        seed: Of the samples.

    Returns:
        Acceptance lengths (bonus token included) by mode, the distinct-bigram ratio, and the number of linear
        steps.
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    length = prompts.shape[1]
    lengths = torch.full((len(prompts),), length, device=prompts.device)
    total = length + new_tokens
    rows = continue_rows(pair.target, prompts, lengths, total, temperature, pair.table, generator)
    candidate_tokens, candidate_scores = draft_candidates(pair, rows, length)
    texts, tokens, scores = rows[:, length:].tolist(), candidate_tokens.tolist(), candidate_scores.tolist()
    shapes = {"dflash": (pair.block_size - 1, 1)}
    shapes |= {f"ddtree_{budget}": (budget, TOPK_CAP) for budget in TREE_BUDGETS}
    result: dict[str, float] = {}
    for name, (budget, cap) in shapes.items():
        counts = [replay(*row, budget, cap) for row in zip(texts, tokens, scores, strict=True)]
        steps = sum(count[1] for count in counts)
        result[name] = round(sum(count[0] for count in counts) / steps, 3)
        if name == "dflash":
            result["dflash_steps"] = steps
    result["distinct_bigram_ratio"] = round(sum(map(distinct_bigram_ratio, texts)) / len(texts), 3)
    return result
