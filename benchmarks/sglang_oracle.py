"""A plugin of SGLang whose drafter knows the plain continuation, for sglang_mla.py.

The drafter runs as always; the candidates of its slots are then replaced: each slot offers the token that
plain decoding gives there, at a rank that changes from slot to slot, among tokens that it does not give. So a
tree holds the continuation on a path that is seldom the first, and accepted K/V rows have to move.

`DDTREE_ORACLE` names a JSON file {"texts": [[prompt and continuation], ...], "prompts": [length, ...]}, which
has to be there at the first decode step. `DDTREE_LEAVE_MOVES_OUT=1` leaves the rows where they were verified.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

RANKS = 2  # of budget 32, every path over two children a slot fits for four slots, and the best of more
MOVED = "moved.json"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", plant, HookType.BEFORE)


def plant(scheduler: Any) -> None:
    """Replace what the worker drafts, and count what it moves."""
    from toolkit.ddtree.sglang import worker
    from toolkit.ddtree.sglang.kernels import RowMover

    oracle = Oracle(scheduler.draft_worker.block_size - 1)
    draft, walk = worker.DDTreeWorker._draft, worker.walk_trees
    counts = Counts()

    def drafted(self: Any, batch: Any, draft_input: Any) -> Any:
        return oracle.replaced(draft(self, batch, draft_input), self, batch, draft_input)

    def walked(trees: Any, chosen: Any, slots: Any, *more: Any) -> Any:
        commit = walk(trees, chosen, slots, *more)
        counts.see(commit, slots.shape[1])
        return commit

    worker.DDTreeWorker._draft = drafted
    worker.walk_trees = walked
    if os.environ.get("DDTREE_LEAVE_MOVES_OUT") == "1":
        RowMover.__call__ = lambda *_: None  # type: ignore[method-assign]


class Oracle:
    """What plain decoding gave, by prompt.

    Args:
        slots: S, tokens that a block offers behind its bonus token.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._on: dict[Any, Any] = {}

    @cached_property
    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(Path(os.environ["DDTREE_ORACLE"]).read_text(encoding="utf-8"))
        return told

    @cached_property
    def _rows(self) -> dict[tuple[int, ...], int]:
        pairs = zip(self._told["texts"], self._told["prompts"], strict=True)
        return {tuple(text[:length]): row for row, (text, length) in enumerate(pairs)}

    def _table(self, device: Any) -> Any:
        """Texts, int64 [texts, longest + S + 2], 0 behind each."""
        import torch

        if device not in self._on:
            longest = max(map(len, self._told["texts"])) + self._slots + 2
            table = [text + [0] * (longest - len(text)) for text in self._told["texts"]]
            self._on[device] = torch.tensor(table, device=device)
        return self._on[device]

    def replaced(self, draft: Any, worker: Any, batch: Any, draft_input: Any) -> Any:
        """The draft with trees over planted candidates."""
        import torch

        from toolkit.ddtree.kernels.tree_builder import build_trees
        from toolkit.ddtree.sglang.requests import limits_of
        from toolkit.ddtree.tree import BatchLimits

        device, topk = draft.tokens.device, draft.tokens.shape[2]
        table = self._table(device)
        row = torch.tensor([self._rows[tuple(req.origin_input_ids)] for req in batch.reqs]).to(device)
        # Committed tokens have K/V; the bonus token follows them, and then the first slot's.
        place = batch.seq_lens.unsqueeze(1) + 1 + torch.arange(self._slots, device=device)
        planted = table[row].gather(1, place.clamp(max=table.shape[1] - 1))
        rank = (place * 7 + row.unsqueeze(1) * 3) // 2 % RANKS
        ranks = torch.arange(topk, device=device)
        others = (planted.unsqueeze(2) + 1 + ranks) % worker.model_runner.model_config.vocab_size
        tokens = others.scatter(2, rank.unsqueeze(2), planted.unsqueeze(2)).contiguous()
        falling = -0.7 - 0.01 * ranks - 3.0 * (ranks >= RANKS)
        logprobs = falling.float().expand(tokens.shape).contiguous()
        packed = worker._drafter()._upload(limits_of(batch.reqs, worker._options))
        roots = draft_input.bonus_tokens.view(-1).contiguous()
        budget = worker._options.budget
        trees, links = build_trees(logprobs, tokens, roots, BatchLimits(*packed.unbind(0)), budget, None)
        return replace(draft, trees=trees, links=links, tokens=tokens, logprobs=logprobs, children=None)


class Counts:
    """How many commits there were, and how many of them moved rows; kept in a file."""

    def __init__(self) -> None:
        self._path = Path(os.environ["DDTREE_BENCHMARK_FOLDER"]) / MOVED
        self._counts = {"commits": 0, "moving": 0, "tokens": 0, "longest": 0}

    def see(self, commit: Any, width: int) -> None:
        """Count one step's; waits for the device."""
        import torch

        nodes, lengths = (commit.rows % width).cpu(), commit.lengths.cpu()
        places = torch.arange(nodes.shape[1])
        moved = ((nodes != places) & (places < lengths.unsqueeze(1))).any(1)
        self._counts["commits"] += len(moved)
        self._counts["moving"] += int(moved.sum())
        self._counts["tokens"] += int(lengths.sum())
        self._counts["longest"] = max(self._counts["longest"], int(lengths.max()))
        self._path.write_text(json.dumps(self._counts), encoding="utf-8")
