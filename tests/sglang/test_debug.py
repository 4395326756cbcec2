"""Debug lines of a verify step: the device's statistics beside the plain ones, and the file."""

import json
import stat
import threading

import pytest
import torch

from toolkit.ddtree.kernels.tree_builder import build_trees, tree_links
from toolkit.ddtree.server.debug_log import DebugLog
from toolkit.ddtree.sglang import debug
from toolkit.ddtree.sglang.debug import DebugRecorder
from toolkit.ddtree.sglang.draft import Draft
from toolkit.ddtree.sglang.kernels import walk_trees
from toolkit.ddtree.transition import TransitionTable
from toolkit.ddtree.tree import BatchLimits, topk_logprobs
from toolkit.ddtree.types import Expansion, TreeLimits
from toolkit.ddtree.walk import round_stats, walk

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted here, run by tests/gpu there")

VOCABULARY, BUDGET, SLOTS, RANKS = 20, 12, 4, 3
LIMITS = (
    TreeLimits(BUDGET, RANKS),
    TreeLimits(4, 1, Expansion.CHAIN),
    TreeLimits(BUDGET, RANKS, Expansion.CHAIN_SEEDED),
    TreeLimits(2, 2),
    TreeLimits(BUDGET, RANKS, Expansion.TRANSITION),  # its deepest nodes need not follow the chain
)


def step(seed, luck):
    """A draft, the target's tokens and the commit; more luck, longer accepted paths."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(LIMITS), SLOTS, VOCABULARY, generator=generator) * 2
    logprobs, tokens = topk_logprobs(logits, RANKS)
    tokens = tokens.contiguous()
    roots = torch.randint(0, VOCABULARY, (len(LIMITS),), generator=generator)
    factors = torch.randn(2, VOCABULARY, 4, generator=generator) * 2
    table = TransitionTable(*factors.unbind(), torch.ones(SLOTS))
    limits = BatchLimits.of(LIMITS)
    children = table.rank_children(logprobs, tokens, roots, limits.topk_cap)
    trees, _ = build_trees(logprobs, tokens, roots, limits, BUDGET, children)
    targets = torch.randint(0, VOCABULARY, trees.tokens.shape, generator=generator)
    for request in range(len(LIMITS)):
        for node in range(1, int(trees.counts[request]) + 1):
            if torch.rand((), generator=generator) < luck:
                targets[request, trees.parents[request, node]] = trees.tokens[request, node]
    slots = torch.arange(trees.tokens.numel()).view(trees.tokens.shape)
    commit = walk_trees(trees, targets, slots, torch.zeros(len(LIMITS), dtype=torch.int64), SLOTS + 1)
    return Draft(trees, tree_links(trees), tokens, logprobs, None), targets, commit


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_those_of_the_plain_walk(tmp_path):
    path = tmp_path / "debug.jsonl"
    recorder = DebugRecorder(path, 1 << 20)
    expected = []
    for seed in range(12):
        draft, targets, commit = step(seed, luck=(0.1, 0.5, 0.9)[seed % 3])
        recorder.record(draft, commit)
        expected += round_stats(draft.trees, walk(draft.trees, targets), draft.tokens)
    recorder.close()
    lines = written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [tuple(line.values()) for line in lines] == [
        (x.nodes, x.depth, x.accepted, x.committed, x.chain_in_tree, list(x.ranks), x.reject_rank)
        for x in expected
    ]
    assert {line["chain_in_tree"] for line in lines} == {True, False}
    assert {None, -1} < {line["reject_rank"] for line in lines}
    assert max(line["accepted"] for line in lines) == SLOTS


def test_a_slow_disk_holds_nothing_up(tmp_path, monkeypatch, caplog):
    """Steps beyond those that may wait are dropped, counted, and told once."""
    disk = threading.Event()
    write = DebugLog.write
    monkeypatch.setattr(debug, "_WAITING", 2)
    monkeypatch.setattr(DebugLog, "write", lambda log, line: (disk.wait(20), write(log, line)))
    path = tmp_path / "debug.jsonl"
    recorder = DebugRecorder(path, 1 << 20)
    draft, _, commit = step(1, 0.5)
    for _ in range(9):
        recorder.record(draft, commit)
    assert recorder.dropped >= 6
    assert sum("being dropped" in message for message in caplog.messages) == 1
    disk.set()
    recorder.close()
    assert len(written(path)) == len(LIMITS) * (9 - recorder.dropped)
