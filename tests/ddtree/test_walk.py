"""Walking verified trees, moving K/V rows, and the statistics of a round."""

import pytest
import torch

from toolkit.ddtree.tree import BatchLimits, DraftTrees, build_trees
from toolkit.ddtree.types import Expansion, RoundStats, TreeLimits
from toolkit.ddtree.walk import compaction_indices, round_stats, walk

SLOTS, RANKS = 4, 3


def candidates(requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random falling log-probabilities, and tokens that name their slot and rank: 10 * slot + rank."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(requests, SLOTS, RANKS, generator=generator)
    logprobs = torch.log_softmax(logits, -1).sort(-1, descending=True).values
    tokens = 10 * torch.arange(1, SLOTS + 1).view(-1, 1) + torch.arange(RANKS)
    return logprobs, tokens.expand(requests, SLOTS, RANKS)


def tree(limits: list[TreeLimits], max_budget: int = 20) -> DraftTrees:
    logprobs, tokens = candidates(len(limits))
    return build_trees(logprobs, tokens, torch.full((len(limits),), 5), BatchLimits.of(limits), max_budget)


def walk_by_hand(trees: DraftTrees, row: int, target: list[int]) -> tuple[list[int], int]:
    """The path and the bonus token, one comparison at a time."""
    path = [0]
    while True:
        children = [
            node
            for node in range(1, trees.counts[row].item() + 1)
            if trees.parents[row, node] == path[-1] and trees.tokens[row, node] == target[path[-1]]
        ]
        if not children:
            return path, target[path[-1]]
        path.append(children[0])


MIXED = [
    TreeLimits(20, 3),
    TreeLimits(4, 1, Expansion.CHAIN),
    TreeLimits(9, 3, Expansion.CHAIN_SEEDED),
    TreeLimits(2, 2),
    TreeLimits(0, 1),
]


@pytest.mark.parametrize("seed", range(20))
def test_walk_follows_the_target(seed):
    trees = tree(MIXED)
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, RANKS + (seed % 2), trees.tokens.shape, generator=generator)
    if seed % 5 == 0:
        ranks.zero_()
    target = 10 * (trees.depths + 1) + ranks
    walked = walk(trees, target)
    for row in range(len(MIXED)):
        path, bonus = walk_by_hand(trees, row, target[row].tolist())
        assert walked.path[row].tolist() == path + [-1] * (SLOTS + 1 - len(path))
        assert walked.accepted[row] == len(path) - 1
        assert walked.bonus[row] == bonus


def test_the_whole_chain_can_be_accepted():
    trees = tree([TreeLimits(4, 1, Expansion.CHAIN)])
    walked = walk(trees, 10 * (trees.depths + 1))
    assert walked.path.tolist() == [[0, 1, 2, 3, 4]]
    assert walked.bonus.tolist() == [50]
    assert walked.committed(trees).tolist() == [[10, 20, 30, 40, 50]]


def test_committed_tokens_are_the_matched_and_the_bonus():
    trees = tree([TreeLimits(4, 1, Expansion.CHAIN)] * 2)
    target = 10 * (trees.depths + 1)
    target[0, 2] = 7
    target[1, 0] = 8
    assert walk(trees, target).committed(trees).tolist() == [[10, 20, 7, -1, -1], [8, -1, -1, -1, -1]]


def test_padding_never_matches():
    trees = tree([TreeLimits(0, 1)])
    target = torch.full_like(trees.tokens, 5)
    walked = walk(trees, target)
    assert (trees.tokens == 5).all()
    assert walked.accepted.tolist() == [0]
    assert walked.bonus.tolist() == [5]


def test_a_repeated_token_is_followed():
    """The root's token again, and again: the root must not be taken for its own child."""
    logprobs = torch.full((1, 3, 1), -0.5)
    tokens = torch.full((1, 3, 1), 5)
    trees = build_trees(logprobs, tokens, torch.tensor([5]), BatchLimits.of([TreeLimits(3, 1)]), 3)
    walked = walk(trees, torch.full((1, 4), 5))
    assert walked.path.tolist() == [[0, 1, 2, 3]]


def test_a_cousin_with_the_same_token_is_not_taken():
    trees = tree([TreeLimits(20, 3)])
    target = torch.full_like(trees.tokens, 21)
    assert (trees.tokens == 21).any()
    assert walk(trees, target).accepted.tolist() == [0]


def test_compaction_moves_the_accepted_rows_to_the_front():
    trees = tree(MIXED)
    target = 10 * (trees.depths + 1) + (torch.arange(21) % 2)
    walked = walk(trees, target)
    assert walked.accepted.max() >= 2
    starts = torch.arange(len(MIXED)) * 40 + 3
    cache = torch.arange(250)
    source, destination = compaction_indices(walked, starts)
    assert source.shape == destination.shape == (len(MIXED), SLOTS)
    moved = cache.clone()
    moved[destination] = cache[source]
    for row, start in enumerate(starts.tolist()):
        accepted = walked.accepted[row].item()
        path = walked.path[row, : accepted + 1]
        assert moved[start : start + accepted + 1].tolist() == (start + path).tolist()
        rest = slice(start + accepted + 1, start + 37)
        assert torch.equal(moved[rest], cache[rest])


class TestRoundStats:
    def test_of_a_full_and_a_broken_path(self):
        trees = tree([TreeLimits(4, 1, Expansion.CHAIN)] * 3)
        target = 10 * (trees.depths + 1)
        target[1, 2] = 32
        target[2, 0] = 99
        _, tokens = candidates(3)
        full, broken, outside = round_stats(trees, walk(trees, target), tokens)
        assert full == RoundStats(4, 4, 4, 5, True, (0, 0, 0, 0), None)
        assert broken == RoundStats(4, 4, 2, 3, True, (0, 0), 2)
        assert outside == RoundStats(4, 4, 0, 1, True, (), -1)

    def test_ranks_are_those_of_the_accepted_nodes(self):
        trees = tree([TreeLimits(20, 3)])
        target = 10 * (trees.depths + 1) + 1
        walked = walk(trees, target)
        (stats,) = round_stats(trees, walked, candidates(1)[1])
        assert stats.accepted >= 1
        assert stats.ranks == (1,) * stats.accepted
        assert stats.reject_rank == 1
        assert stats.nodes == 20

    def test_rank_0_nodes_off_the_chain_do_not_make_it_whole(self):
        logprobs = torch.tensor([[[-0.7, -0.7], [-0.1, -5.0], [-9.0, -9.0]]])
        tokens = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
        trees = build_trees(logprobs, tokens, torch.tensor([0]), BatchLimits.of([TreeLimits(4, 2)]), 4)
        assert trees.ranks.tolist() == [[-1, 0, 1, 0, 0]]
        (stats,) = round_stats(trees, walk(trees, torch.zeros_like(trees.tokens)), tokens)
        assert not stats.chain_in_tree

    def test_a_tree_without_the_chain_says_so(self):
        short, whole = tree([TreeLimits(3, 3), TreeLimits(4, 3, Expansion.CHAIN_SEEDED)]), None
        walked = walk(short, torch.zeros_like(short.tokens))
        (whole_or_not, whole) = round_stats(short, walked, candidates(2)[1])
        assert not whole_or_not.chain_in_tree
        assert whole.chain_in_tree
        assert whole_or_not.depth < SLOTS
