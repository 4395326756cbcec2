"""What a tree drafter is made of: the target's head, the drafter's transition table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group

from toolkit.ddtree.models.config import read_drafter_config
from toolkit.ddtree.models.loading import load_transition
from toolkit.ddtree.sglang.draft import DraftCandidates, TreeDrafter
from toolkit.ddtree.sglang.options import TreeOptions
from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.types import Expansion


def load_tree_drafter(
    target: Any, folder: str, block_size: int, options: TreeOptions, most: int
) -> TreeDrafter:
    """Make the end of the drafter's forward.

    Args:
        target: SGLang's target model, whose head the drafter borrows.
        folder: the drafter's checkpoint.
        block_size: slots of a block, the bonus token's included.
        options: the server's.
        most: the largest batch of a CUDA graph, in requests.

    Raises:
        ValueError: the head is quantised, or has tokens added to the vocabulary.
        CheckpointError: the policy is `transition`, and the drafter's table cannot be read.
    """
    head = getattr(target, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not torch.is_floating_point(weight):
        raise ValueError("the target has no unquantised lm_head to draft with")
    group = get_tp_group()
    shard = getattr(head, "shard_indices", None)
    if shard is not None and int(shard.num_added_elements) != 0:
        raise ValueError("the target's vocabulary has added tokens; its head cannot be drafted with")
    candidates = DraftCandidates(
        weight=weight,
        shard=weight.shape[0] if shard is None else int(shard.num_org_elements),
        first_token=0 if shard is None else int(shard.org_vocab_start_index),
        block_size=block_size,
        topk=options.topk_cap,
        group=group if group.world_size > 1 else None,
    )
    table = _transition(Path(folder), weight.device) if options.expansion is Expansion.TRANSITION else None
    return TreeDrafter(candidates, block_size, options.limits, most, weight.device, table)


def _transition(folder: Path, device: torch.device) -> TransitionTable:
    table = load_transition(folder, read_drafter_config(folder), device)
    if table is None:
        raise ValueError(f"expansion transition needs a transition table, and {folder} has none")
    return table
