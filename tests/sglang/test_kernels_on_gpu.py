"""The plugin's kernels on a GPU, at the sizes they are made for, against plain torch."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(reason="no CUDA GPU on this machine", allow_module_level=True)

from toolkit.ddtree.kernels.penalties import PenaltyTable, count_tokens, penalise
from toolkit.ddtree.kernels.tree_builder import build_trees
from toolkit.ddtree.sglang.kernels import RowMover, place_rows, walk_trees
from toolkit.ddtree.tree import BatchLimits, ancestor_mask, positions, topk_logprobs
from toolkit.ddtree.types import Expansion, TreeLimits
from toolkit.ddtree.walk import walk

pytestmark = pytest.mark.gpu

REQUESTS, SLOTS, RANKS, VOCABULARY = 24, 7, 8, 151_936


@pytest.fixture(params=[16, 33, 64, 255], ids=lambda budget: f"budget {budget}")
def grown(request):
    generator = torch.Generator("cuda").manual_seed(request.param)
    logits = torch.randn(REQUESTS, SLOTS, 200, device="cuda", generator=generator) * 6
    logprobs, tokens = topk_logprobs(logits, RANKS)
    policies = (Expansion.BEST_FIRST, Expansion.CHAIN_SEEDED, Expansion.CHAIN)
    limits = [TreeLimits(max(7, request.param - r), RANKS, policies[r % 3]) for r in range(REQUESTS)]
    roots = torch.arange(REQUESTS, device="cuda")
    batch = BatchLimits.of(limits, "cuda")
    return *build_trees(logprobs, tokens.contiguous(), roots, batch, request.param), generator


def test_rows_and_masks(grown):
    trees, links, generator = grown
    width = trees.tokens.shape[1]
    lengths = torch.randint(0, 3000, (REQUESTS,), device="cuda", generator=generator)
    table = torch.randperm(64 * 4096, device="cuda", generator=generator).to(torch.int32).view(64, 4096)
    places = torch.randperm(64, device="cuda", generator=generator)[:REQUESTS]
    mask = torch.full((int((lengths + width).sum()) * width + 64,), 7, dtype=torch.uint8, device="cuda")
    rows = place_rows(trees, links, lengths, table, places, mask)
    assert torch.equal(rows.positions, positions(trees, lengths))
    expected, start = ancestor_mask(trees), 0
    for request, length in enumerate(lengths.tolist()):
        cells = mask[start : start + width * (length + width)].view(width, length + width)
        assert torch.equal(cells[:, length:].bool(), expected[request])
        assert (cells[:, :length] == 7).all()
        own = table[places[request], length : length + width]
        assert torch.equal(rows.slots[request].to(torch.int32), own)
        start += cells.numel()


def test_the_walk(grown):
    trees, _, generator = grown
    targets = torch.randint(0, 200, trees.tokens.shape, device="cuda", generator=generator)
    lucky = torch.rand(trees.tokens.shape, device="cuda", generator=generator) < 0.8
    for node in range(trees.tokens.shape[1] - 1, 0, -1):  # the better of two children wins
        at, here = trees.parents[:, node], torch.arange(REQUESTS, device="cuda")
        is_node = lucky[:, node] & trees.valid[:, node]
        targets[here, at] = torch.where(is_node, trees.tokens[:, node], targets[here, at])
    slots = torch.randperm(trees.tokens.numel(), device="cuda").view(trees.tokens.shape)
    lengths = torch.arange(REQUESTS, device="cuda")
    commit, expected = walk_trees(trees, targets, slots, lengths, SLOTS + 1), walk(trees, targets)
    assert torch.equal(commit.lengths.long(), expected.accepted + 1)
    assert torch.equal(commit.bonus, expected.bonus)
    assert torch.equal(commit.tokens, expected.committed(trees).clamp(min=0))
    own = torch.arange(SLOTS + 1, device="cuda").expand_as(expected.path)
    path = torch.where(expected.path >= 0, expected.path, own)
    assert torch.equal(commit.sources, slots.gather(1, path))
    assert commit.lengths.max() > 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_overlapping_rows_move_as_if_all_were_read_first(dtype):
    """Many times, for a missing barrier shows now and then only."""
    generator = torch.Generator("cuda").manual_seed(1)
    buffers = [
        torch.randint(0, 255, (4096, 8, size), dtype=torch.uint8, device="cuda", generator=generator)
        .view(torch.uint8)
        .view(dtype)
        for size in (128, 256, 256, 576)
    ]
    mover = RowMover(buffers)
    for _ in range(50):
        rows = torch.randperm(4096, device="cuda", generator=generator)[: REQUESTS * 33].view(REQUESTS, 33)
        targets = rows[:, : SLOTS + 1].contiguous()
        order = torch.rand(REQUESTS, 32, device="cuda", generator=generator).argsort(1)[:, :SLOTS]
        chosen = torch.cat([torch.zeros_like(order[:, :1]), order.sort(1).values + 1], dim=1)
        sources = rows.gather(1, chosen)
        expected = [buffer.view(torch.uint8).clone() for buffer in buffers]
        for old in expected:
            old[targets.flatten()] = old[sources.flatten()]
        mover(sources, targets)
        for buffer, old in zip(buffers, expected, strict=True):
            assert torch.equal(buffer.view(torch.uint8), old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties(grown, dtype):
    trees, _, generator = grown
    width = trees.tokens.shape[1]
    counts = torch.zeros(5, VOCABULARY, dtype=torch.int32, device="cuda")
    counts[:, :200] = torch.randint(0, 3, (5, 200), device="cuda", generator=generator, dtype=torch.int32)
    told = PenaltyTable(
        counts,
        torch.tensor([[0.5, 0.2, 1.3], [0, 0, 1], [-1, 0.5, 1], [0, 0, 0.8], [0.1, 0, 1]], device="cuda"),
        torch.tensor([[3, 6], [0, 5], [9, 0], [2, 4], [1, 1]], dtype=torch.int32, device="cuda"),
        torch.tensor([[5, VOCABULARY - 1], [7, -1], [-1, -1], [9, -1], [3, -1]], device="cuda").int(),
    )
    rows = (torch.arange(REQUESTS, device="cuda") % 6 - 1).to(torch.int32)
    logits = torch.randn(REQUESTS * width, VOCABULARY, device="cuda", generator=generator).to(dtype) * 4
    expected = logits.clone()
    penalise(logits, rows, told, trees)
    seen = ancestor_mask(trees)
    for request in range(REQUESTS):
        row = int(rows[request])
        if row < 0:
            continue
        last = int(trees.counts[request]) + 1
        on_path = torch.zeros(last, VOCABULARY, device="cuda", dtype=torch.float32)
        drafted = seen[request, :last, 1:last].float()
        on_path.scatter_add_(1, trees.tokens[request, 1:last].expand(last, -1), drafted)
        total = told.counts[row] + on_path
        frequency, presence, repetition = told.settings[row].tolist()
        part = expected[request * width : request * width + last].float()
        part = part - frequency * total - presence * (total > 0)
        part = torch.where(total > 0, torch.where(part < 0, part * repetition, part / repetition), part)
        produced, least = told.lengths[row].tolist()
        short = produced + trees.depths[request, :last] < least
        held = [token for token in told.stops[row].tolist() if token >= 0]
        part[:, held] = torch.where(short[:, None], float("-inf"), part[:, held])
        expected[request * width : request * width + last] = part.to(dtype)
    is_row = trees.valid.flatten().clone()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits[is_row], expected[is_row], atol=tolerance, rtol=tolerance)


def test_counts():
    """A token committed twice in one step is counted twice."""
    told = PenaltyTable(
        torch.zeros(3, VOCABULARY, dtype=torch.int32, device="cuda"),
        torch.zeros(3, 3, device="cuda"),
        torch.zeros(3, 2, dtype=torch.int32, device="cuda"),
        torch.zeros(3, 1, dtype=torch.int32, device="cuda"),
    )
    tokens = torch.full((3, 8), VOCABULARY - 1, device="cuda")
    lengths = torch.tensor([8, 3, 5], dtype=torch.int32, device="cuda")
    count_tokens(torch.tensor([2, -1, 0], dtype=torch.int32, device="cuda"), tokens, lengths, told)
    assert told.counts[:, -1].tolist() == [5, 0, 8]
    assert told.lengths[:, 0].tolist() == [5, 0, 8]
    assert int(told.counts.sum()) == 13
