"""After verification: follow the target through the tree, move the accepted K/V rows, report the round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.ddtree.tree import DraftTrees
from toolkit.ddtree.types import RoundStats


@dataclass(frozen=True, slots=True)
class Walk:
    """What the target accepted of a batch of trees.

    Attributes:
        path: int64 [R, S+1], node index at each depth; column 0 is the root, -1 beyond the accepted depth.
        accepted: int64 [R], matched draft tokens.
        bonus: int64 [R], the target's choice at the last accepted node, the next round's root token.
    """

    path: Tensor
    accepted: Tensor
    bonus: Tensor

    def committed(self, trees: DraftTrees) -> Tensor:
        """Tokens the round commits, int64 [R, S+1]: the matched ones, the bonus token, then -1."""
        depth = torch.arange(self.path.shape[1], device=self.path.device)
        matched = trees.tokens.gather(1, self.path[:, 1:].clamp(min=0))
        matched = torch.cat([matched, matched.new_full((matched.shape[0], 1), -1)], dim=1)
        accepted = self.accepted.unsqueeze(1)
        return torch.where(
            depth < accepted, matched, torch.where(depth == accepted, self.bonus.unsqueeze(1), -1)
        )


def walk(trees: DraftTrees, target_tokens: Tensor) -> Walk:
    """Follow, from the root, the child that holds the target's token, until no child does.

    With the target's argmax this is greedy decoding. With the target's own draw at each node it is exact
    sampling, whatever the tree: the tokens are the target's, the tree only tells how far they were foreseen.

    Args:
        trees: the verified trees.
        target_tokens: int [R, N+1], the target's token after each node; what padding holds does not matter.

    Returns:
        Accepted paths; needs no synchronisation with the device.
    """
    if trees.tokens.device.type == "cpu":
        return _walk_on_host(trees, target_tokens)
    return _walk_on_device(trees, target_tokens)


def _walk_on_host(trees: DraftTrees, target_tokens: Tensor) -> Walk:
    """`walk` in plain Python, which on a CPU takes a tenth of the time that small tensor operations do."""
    paths, accepted, bonus = [], [], []
    rows = zip(
        trees.tokens.tolist(),
        trees.parents.tolist(),
        trees.counts.tolist(),
        target_tokens.tolist(),
        strict=True,
    )
    for tokens, parents, count, choices in rows:
        children: dict[tuple[int, int], int] = {}
        for node in range(1, count + 1):
            children.setdefault((parents[node], tokens[node]), node)
        path = [0]
        while (child := children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(child)
        accepted.append(len(path) - 1)
        bonus.append(choices[path[-1]])
        paths.append(path + [-1] * (trees.max_depth + 1 - len(path)))
    return Walk(*(torch.from_numpy(np.array(column)) for column in (paths, accepted, bonus)))


def _walk_on_device(trees: DraftTrees, target_tokens: Tensor) -> Walk:
    """`walk` in tensor operations of fixed shape."""
    matches = trees.tokens == target_tokens.gather(1, trees.parents)
    matches[:, 0] = False  # its own parent, as padding is; but padding is never reached
    node = torch.zeros_like(trees.counts)
    path = [node]
    accepted = torch.zeros_like(trees.counts)
    for _ in range(trees.max_depth):
        child = (matches & (trees.parents == node.unsqueeze(1))).to(torch.int8).argmax(1)
        found = child > 0
        path.append(torch.where(found, child, -1))
        accepted += found
        node = torch.where(found, child, node)
    bonus = target_tokens.gather(1, node.unsqueeze(1)).squeeze(1).to(torch.int64)
    return Walk(torch.stack(path, dim=1), accepted, bonus)


def compaction_indices(walked: Walk, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Where the K/V rows of the accepted paths are, and where they belong.

    The tree of request r lies in rows starts[r] .. starts[r] + N of its cache, in tree order, and its
    accepted node of depth d belongs in row starts[r] + d. The root is in place already. Read every source row
    before writing: the destination of one node can be the source of another.

    Args:
        walked: the accepted paths.
        starts: int [R], the row of each root.

    Returns:
        Source and destination rows, int64 [R, S] each, for depths 1 .. S. Beyond the accepted depth both are
        the same row, so that moving it changes nothing.
    """
    depth = torch.arange(1, walked.path.shape[1], device=walked.path.device)
    path = walked.path[:, 1:]
    base = starts.to(torch.int64).unsqueeze(1)
    return base + torch.where(path >= 0, path, depth), (base + depth).expand_as(path)


def round_stats(trees: DraftTrees, walked: Walk, candidates: Tensor) -> list[RoundStats]:
    """Describe one verify step of each request; copies the trees to the host.

    Args:
        trees: the verified trees.
        walked: what the target accepted.
        candidates: int [R, S, K], the drafter's tokens, among which the rejected token's rank is sought.
    """
    rows = zip(
        trees.parents.tolist(), trees.depths.tolist(), trees.ranks.tolist(), trees.counts.tolist(),
        walked.path.tolist(), walked.accepted.tolist(), walked.bonus.tolist(), candidates.tolist(),
        strict=True,
    )  # fmt: skip
    return [
        RoundStats(
            nodes=count,
            depth=max(depths),
            accepted=accepted,
            committed=accepted + 1,
            chain_in_tree=_chain_depth(parents, ranks, count) == trees.max_depth,
            ranks=tuple(ranks[node] for node in path[1 : accepted + 1]),
            reject_rank=_rank_of(bonus, slots[accepted]) if accepted < trees.max_depth else None,
        )
        for parents, depths, ranks, count, path, accepted, bonus, slots in rows
    ]


def _chain_depth(parents: list[int], ranks: list[int], count: int) -> int:
    """How deep the unbroken chain of rank-0 nodes from the root is."""
    tip = depth = 0
    for node in range(1, count + 1):
        if parents[node] == tip and ranks[node] == 0:
            tip = node
            depth += 1
    return depth


def _rank_of(token: int, slot: list[int]) -> int:
    return slot.index(token) if token in slot else -1
