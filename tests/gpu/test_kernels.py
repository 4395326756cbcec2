"""Tree kernels on a GPU, at the sizes they are made for; the small odd cases are in tests/ddtree."""

import warnings
from dataclasses import fields

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(reason="no CUDA GPU on this machine", allow_module_level=True)

from toolkit.ddtree import tree
from toolkit.ddtree.kernels import topk, tree_builder
from toolkit.ddtree.transition import RankedChildren, TransitionTable
from toolkit.ddtree.tree import BatchLimits, DraftTrees
from toolkit.ddtree.types import Expansion, TreeLimits
from toolkit.ddtree.walk import compaction_indices, walk

pytestmark = pytest.mark.gpu

VOCABULARY = 163_840


@pytest.fixture
def poison():
    """Memory that a kernel leaves unwritten holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def sync_mode():
    """Sets what a wait for the device does; torch warns, once, that it does not see each one."""

    def set_mode(mode: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)

    yield set_mode
    set_mode("default")


def candidates(requests: int, slots: int, ranks: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(requests, slots, 4 * ranks, device="cuda", generator=generator) * 3
    logprobs, tokens = tree.topk_logprobs(logits, ranks)
    return logprobs, tokens.contiguous()


def assert_equal(trees: DraftTrees, links: tree_builder.TreeLinks, expected: DraftTrees) -> None:
    for field in fields(DraftTrees)[:-1]:
        assert torch.equal(getattr(trees, field.name).cpu(), getattr(expected, field.name).cpu()), field.name
    expected_links = tree_builder.tree_links(expected)
    for field in fields(tree_builder.TreeLinks):
        left, right = getattr(links, field.name), getattr(expected_links, field.name)
        assert torch.equal(left.cpu(), right.cpu()), field.name


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "k"),
    [
        (torch.float32, VOCABULARY, 8),
        (torch.bfloat16, VOCABULARY, 8),
        (torch.float16, 50_257, 64),
        (torch.float32, VOCABULARY, 256),
        (torch.bfloat16, VOCABULARY, 1024),
    ],
)
@pytest.mark.usefixtures("poison")
def test_topk(dtype, vocabulary, k):
    generator = torch.Generator("cuda").manual_seed(k)
    logits = (torch.randn(2, 7, vocabulary, device="cuda", generator=generator) * 4).to(dtype)
    logprobs, tokens = topk.topk_logprobs(logits, k)
    expected, expected_tokens = tree.topk_logprobs(logits, k)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("budget", "ranks", "slots"), [(7, 8, 7), (33, 8, 7), (64, 64, 15), (1000, 8, 7), (1024, 1024, 7)]
)
@pytest.mark.usefixtures("poison")
def test_trees_are_the_reference_s_bit_for_bit(budget, ranks, slots):
    logprobs, tokens = candidates(5, slots, ranks)
    limits = [
        TreeLimits(budget, ranks),
        TreeLimits(budget // 2, max(1, ranks // 2)),
        TreeLimits(budget, ranks, Expansion.CHAIN_SEEDED),
        TreeLimits(budget, ranks, Expansion.CHAIN),
        TreeLimits(budget - 1, 1),
    ]
    if budget * ranks <= 8192:  # what one program sorts of re-scored children on any GPU
        limits[1] = TreeLimits(budget // 2, max(1, ranks // 2), Expansion.TRANSITION)
        limits[2] = TreeLimits(budget, ranks, Expansion.TRANSITION)
    roots = torch.arange(5, device="cuda")
    batch, children = BatchLimits.of(limits, "cuda"), None
    if any(limit.expansion is Expansion.TRANSITION for limit in limits):
        children = random_table(slots).rank_children(logprobs, tokens, roots, batch.topk_cap)
    trees, links = tree_builder.build_trees(logprobs, tokens, roots, batch, budget, children)
    expected = tree.build_trees(logprobs, tokens, roots, BatchLimits.of(limits), budget, children)
    assert trees.counts.tolist() == expected.counts.tolist()
    assert_equal(trees, links, expected)


def random_table(slots: int) -> TransitionTable:
    generator = torch.Generator("cuda").manual_seed(0)
    left, right = torch.randn(2, VOCABULARY, 8, device="cuda", generator=generator)
    return TransitionTable(left, right, torch.ones(slots, device="cuda"))


def test_a_captured_graph_serves_other_logits_and_limits():
    logits = torch.randn(3, 7, VOCABULARY, device="cuda") * 4
    roots = torch.zeros(3, dtype=torch.int64, device="cuda")
    limits = BatchLimits.of([TreeLimits(33, 8)] * 3, "cuda")
    table = random_table(7)

    def step() -> tuple[DraftTrees, tree_builder.TreeLinks, torch.Tensor, torch.Tensor, RankedChildren]:
        logprobs, tokens = topk.topk_logprobs(logits, 8)
        children = table.rank_children(logprobs, tokens, roots, limits.topk_cap)
        trees, links = tree_builder.build_trees(logprobs, tokens, roots, limits, 33, children)
        return trees, links, logprobs, tokens, children

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trees, links, logprobs, tokens, children = step()
    for seed in range(3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)) * 4)
        roots.fill_(seed)
        now = [TreeLimits(33, 8), TreeLimits(5 + seed, 3, Expansion.TRANSITION), TreeLimits(20, 1)]
        for held, new in zip(
            (limits.budget, limits.topk_cap, limits.expansion),
            (BatchLimits.of(now).budget, BatchLimits.of(now).topk_cap, BatchLimits.of(now).expansion),
            strict=True,
        ):
            held.copy_(new)
        graph.replay()
        assert torch.equal(tokens, tree.topk_logprobs(logits, 8)[1])
        expected = tree.build_trees(logprobs, tokens, roots, BatchLimits.of(now), 33, children)
        assert_equal(trees, links, expected)


def test_a_round_never_waits_for_the_device(sync_mode):
    logits = torch.randn(2, 7, VOCABULARY, device="cuda")
    roots = torch.zeros(2, dtype=torch.int64, device="cuda")
    limits = BatchLimits.of([TreeLimits(33, 8)] * 2, "cuda")
    starts = torch.arange(2, device="cuda")
    table = random_table(7)
    for mode in ("default", "error"):
        sync_mode(mode)
        logprobs, tokens = topk.topk_logprobs(logits, 8)
        children = table.rank_children(logprobs, tokens, roots, limits.topk_cap)
        trees, _ = tree_builder.build_trees(logprobs, tokens, roots, limits, 33, children)
        walked = walk(trees, trees.tokens.roll(-1, 1))
        tree.ancestor_mask(trees)
        tree.positions(trees, starts)
        compaction_indices(walked, starts)
        walked.committed(trees)
