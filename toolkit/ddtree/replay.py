"""Replay a recorded trace under any tree policy, without a model.

Speculative decoding is lossless: the greedy continuation is the same whatever the tree. A trace that holds
the drafter's candidates at every position of a continuation therefore gives, exactly, the acceptance length
of any policy.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.tree import BatchLimits, build_trees
from toolkit.ddtree.types import TreeLimits
from toolkit.ddtree.walk import walk

_FIELDS = ("tokens", "draft_logprob", "draft_token", "prompt_len", "block_size")


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy continuations of n prompts, with the drafter's candidates at a anchors of each.

    Attributes:
        tokens: int64 [n, prompt_len + g], each prompt and its greedy continuation.
        draft_logprobs: float32 [n, a, S, K]; anchor j drafts after the token at prompt_len + j.
        draft_tokens: int64 [n, a, S, K].
        prompt_len: tokens of each prompt.
        block_size: S + 1.
    """

    tokens: Tensor
    draft_logprobs: Tensor
    draft_tokens: Tensor
    prompt_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy would have accepted.

    Attributes:
        rounds: verify steps.
        committed: tokens committed, bonus tokens included.
        matched: int64 [n, a], draft tokens that the tree of each anchor matches, round or no round.
    """

    rounds: int
    committed: int
    matched: Tensor

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step commits, the bonus token included."""
        return self.committed / self.rounds


def load_trace(path: Path) -> Trace:
    """Read a trace from an .npz file.

    Raises:
        ValueError: the file is no trace, or its arrays do not fit together.
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            fields = {name: arrays[name] for name in _FIELDS}
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a trace: {error}; record it again") from error
    trace = Trace(
        torch.from_numpy(fields["tokens"].astype(np.int64)),
        torch.from_numpy(fields["draft_logprob"].astype(np.float32)),
        torch.from_numpy(fields["draft_token"].astype(np.int64)),
        int(fields["prompt_len"]),
        int(fields["block_size"]),
    )
    _check_shapes(path, trace)
    return trace


def replay(trace: Trace, limits: TreeLimits, table: TransitionTable | None = None) -> Replay:
    """Count the rounds of greedy decoding along the trace.

    A round starts at anchor j while j < a - block_size, and the next one at j + matched + 1.

    Args:
        trace: the trace.
        limits: limits of every tree.
        table: for the policy `transition`, in the trace's tokens. What it gains is worth nothing if it was
            made from text that holds rows of the trace.

    Raises:
        ValueError: the trace is too short for one round, or the limits are out of range or need a table.
    """
    anchors = trace.draft_tokens.shape[1]
    last = anchors - trace.block_size
    if last < 1:
        raise ValueError(f"{anchors} anchors are too few to replay blocks of {trace.block_size}")
    matched = _match(trace, limits, table)
    rounds = committed = 0
    for row in matched.tolist():
        anchor = 0
        while anchor < last:
            rounds += 1
            committed += row[anchor] + 1
            anchor += row[anchor] + 1
    return Replay(rounds, committed, matched)


def _match(trace: Trace, limits: TreeLimits, table: TransitionTable | None) -> Tensor:
    """Draft tokens that the tree of each anchor matches, int64 [n, a]."""
    anchors, slots = trace.draft_tokens.shape[1:3]
    batch = BatchLimits.of([limits] * anchors)
    continuation = trace.tokens[:, trace.prompt_len :]
    foreseen = torch.nn.functional.pad(continuation, (0, slots + 1), value=-1).unfold(1, slots + 2, 1)
    matched = []
    for logprobs, tokens, ahead in zip(
        trace.draft_logprobs, trace.draft_tokens, foreseen[:, :anchors], strict=True
    ):
        roots = ahead[:, 0]
        children = None if table is None else table.rank_children(logprobs, tokens, roots, batch.topk_cap)
        trees = build_trees(logprobs, tokens, roots, batch, limits.budget, children)
        matched.append(walk(trees, ahead.gather(1, trees.depths + 1)).accepted)
    return torch.stack(matched)


def _check_shapes(path: Path, trace: Trace) -> None:
    shape = tuple(trace.draft_tokens.shape)
    if len(shape) != 4 or shape != tuple(trace.draft_logprobs.shape):
        raise ValueError(f"{path}: draft_token {shape} and draft_logprob differ; record the trace again")
    if shape[2] != trace.block_size - 1:
        raise ValueError(f"{path}: {shape[2]} draft slots do not fit block_size {trace.block_size}")
    if trace.tokens.ndim != 2 or trace.tokens.shape[0] != shape[0]:
        raise ValueError(f"{path}: tokens {tuple(trace.tokens.shape)} do not fit {shape[0]} drafted rows")
    if trace.prompt_len < 1 or trace.tokens.shape[1] - trace.prompt_len < shape[1]:
        raise ValueError(f"{path}: the continuation is shorter than the {shape[1]} anchors")
