"""Checks of a running server, each by another way than the one it decodes by.

One request of the server's own is decoded among the others. At its first verification its tree is looked
through and parts of it are verified again; in all of its steps the walk and the moved K/V rows are compared
with plain twins. This is allowed to wait for the device, and does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.ddtree.kernels.tree_builder import TreeLinks, tree_links
from toolkit.ddtree.sglang.draft import Draft
from toolkit.ddtree.sglang.kernels import Commit, VerifyRows
from toolkit.ddtree.transition import RankedChildren
from toolkit.ddtree.tree import BatchLimits, DraftTrees, ancestor_mask, build_trees, positions
from toolkit.ddtree.types import TreeLimits
from toolkit.ddtree.walk import walk

_RELATIVE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
_CHANGED = 1e-4  # relative difference of logits that a hidden ancestor must at least make

Verify = Callable[[DraftTrees, TreeLinks], tuple[VerifyRows, Any, bool]]


@dataclass(slots=True)
class Check:
    """One check: what was measured, the limit it was judged by, and in words what was compared."""

    name: str
    ok: bool
    measured: float
    limit: float
    detail: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A verification as the decode step has it.

    Attributes:
        index: the checked request's place in the batch.
        draft: what was verified.
        limits: of each request.
        block: int64 [R, block], the drafter's input.
        rows: where the trees stand.
        logits: [R, W, vocabulary], the target's, untouched.
        lengths: int64 [R], committed lengths.
        mask: uint8, what the target's attention was given.
        table: int32, the request's row of SGLang's table of cache rows.
    """

    index: int
    draft: Draft
    limits: tuple[TreeLimits, ...]
    block: Tensor
    rows: VerifyRows
    logits: Tensor
    lengths: Tensor
    mask: Tensor
    table: Tensor


class SelfCheck:
    """The checks of one request.

    Args:
        rid: the request's.
        mask_token: the drafter's.
        dtype: the target's.
    """

    def __init__(self, rid: str, mask_token: int, dtype: torch.dtype) -> None:
        self.rid = rid
        self.steps = 0
        self._mask_token = mask_token
        self._relative = _RELATIVE.get(dtype, 0.08)
        self._checks: dict[str, Check] = {}
        self._moved = self._wrong_rows = self._wrong_walks = 0

    def results(self) -> list[dict[str, Any]]:
        """One object a check; none before a step was checked."""
        return [asdict(check) for check in self._checks.values()]

    def look_through(self, seen: Verified) -> None:
        """Check what the draft and the placing of rows gave."""
        trees, index = seen.draft.trees, seen.index
        block = seen.block[index].tolist()
        expected = [int(trees.tokens[index, 0])] + [self._mask_token] * (len(block) - 1)
        wrong = sum(a != b for a, b in zip(block, expected, strict=True))
        self._add("draft_block", wrong, f"the bonus token, then {len(block) - 1} mask tokens")
        self._tree(seen)
        wrong = int((seen.rows.positions != positions(trees, seen.lengths))[index].sum())
        self._add("node_positions", wrong, "each node stands at the root's position plus its depth")
        length, width = int(seen.lengths[index]), trees.tokens.shape[1]
        slots = seen.table[length : length + width]
        self._add("cache_rows", int((seen.rows.slots[index] != slots).sum()), "K/V rows behind the prefix")
        start = sum(width * (int(x) + width) for x in seen.lengths[:index])
        cells = seen.mask[start : start + width * (length + width)].view(width, length + width)[:, length:]
        wrong = int((cells.bool() != ancestor_mask(trees)[index]).sum())
        self._add("ancestor_mask", wrong, "each node sees its ancestors and itself, and no other node")

    def verify_again(self, seen: Verified, verify: Verify) -> None:
        """Verify a path of the tree alone, and the tree with one ancestor hidden; the caller restores."""
        trees, index = seen.draft.trees, seen.index
        path = _path(trees, index)
        logits = seen.logits[index, path].clone()
        chain = _alone(trees, index, path)
        again = self._logits(verify(chain, tree_links(chain))[1], seen)[index, : len(path)]
        measured = _difference(logits, again)
        detail = f"node {path[-1]} and its {len(path) - 1} ancestors against the same tokens as a chain"
        self._judge("node_logits", measured, measured <= self._relative, self._relative, detail)

        links = seen.draft.links
        bits = links.ancestors.clone()
        hidden, node = path[-2], path[-1]
        word, bit = hidden // 64, torch.tensor(1, dtype=torch.int64) << (hidden % 64)
        bits[index, node, word] &= ~bit.to(bits.device)
        again = self._logits(verify(trees, replace(links, ancestors=bits))[1], seen)[index, node]
        measured = _difference(logits[-1], again)
        detail = f"node {node} without node {hidden} must differ by more than the limit"
        self._judge("mask_perturbation", measured, measured > _CHANGED, _CHANGED, detail)

    def follow(self, seen: Verified, chosen: Tensor, commit: Commit) -> None:
        """Compare the walk with its plain twin."""
        self.steps += 1
        expected = walk(seen.draft.trees, chosen)
        differs = (commit.lengths.long() != expected.accepted + 1) | (commit.bonus != expected.bonus)
        self._wrong_walks += int(differs[seen.index])
        self._add("walk", self._wrong_walks, f"accepted paths of {self.steps} steps against the plain walk")

    def rows_before(self, seen: Verified, commit: Commit, buffers: list[Tensor]) -> list[Tensor]:
        """Copies of the K/V rows that a commit moves, from every buffer."""
        return [buffer[self._sources(seen, commit)] for buffer in buffers]

    def rows_after(self, seen: Verified, commit: Commit, buffers: list[Tensor], before: list[Tensor]) -> None:
        """Compare them with what lies where they belong."""
        sources = self._sources(seen, commit)
        targets = seen.rows.slots[seen.index, : len(sources)]
        self._moved += int((sources != targets).sum())
        pairs = zip(buffers, before, strict=True)
        self._wrong_rows += sum(int((buffer[targets] != old).any()) for buffer, old in pairs)
        detail = f"{self._moved} K/V rows of {self.steps} steps were moved in each of {len(buffers)} buffers"
        self._add("accepted_kv", self._wrong_rows, detail)

    def compare_ranks(self, seen: Verified, group: Any) -> None:
        """Compare the tree with those of the other tensor-parallel ranks."""
        trees = seen.draft.trees
        held = torch.stack([trees.tokens, trees.parents])[:, seen.index].cpu().numpy().tobytes()
        digests: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(digests, hashlib.sha256(held).hexdigest(), group=group.cpu_group)
        others = sum(digest != digests[0] for digest in digests)
        self._add("ranks_agree", others, f"the trees of {group.world_size} tensor-parallel ranks")

    def _tree(self, seen: Verified) -> None:
        draft, index = seen.draft, seen.index
        one = slice(index, index + 1)
        children = draft.children
        if children is not None:
            children = RankedChildren(children.logprobs[one].cpu(), children.ranks[one].cpu())
        reference = build_trees(
            draft.logprobs[one].cpu(), draft.tokens[one].cpu(), draft.trees.tokens[one, 0].cpu(),
            BatchLimits.of(seen.limits[one]), draft.trees.tokens.shape[1] - 1, children,
        )  # fmt: skip
        pairs = ((draft.trees.tokens, reference.tokens), (draft.trees.parents, reference.parents))
        wrong = sum(int((ours[one].cpu() != own).sum()) for ours, own in pairs)
        self._add("tree", wrong, f"{int(reference.counts[0])} nodes against the plain builder's")

    def _logits(self, output: Any, seen: Verified) -> Tensor:
        logits: Tensor = output.logits_output.next_token_logits
        return logits.view(seen.logits.shape)

    def _sources(self, seen: Verified, commit: Commit) -> Tensor:
        return commit.sources[seen.index, : int(commit.lengths[seen.index])]

    def _add(self, name: str, wrong: int, detail: str) -> None:
        self._judge(name, float(wrong), wrong == 0, 0.0, detail)

    def _judge(self, name: str, measured: float, ok: bool, limit: float, detail: str) -> None:
        self._checks[name] = Check(name, ok and math.isfinite(measured), measured, limit, detail)


def _path(trees: DraftTrees, index: int) -> list[int]:
    """The deepest node's path from the root; of equally deep ones the last, which is off the chain."""
    parents, depths = trees.parents[index].tolist(), trees.depths[index].tolist()
    path = [max(range(len(depths)), key=lambda node: (depths[node], node))]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def _alone(trees: DraftTrees, index: int, path: list[int]) -> DraftTrees:
    """The same trees, but of one request only a path is left, as nodes 1, 2, ..."""
    columns = {name: getattr(trees, name).clone() for name in ("tokens", "parents", "depths", "counts")}
    width, last = trees.tokens.shape[1], len(path) - 1
    tokens = trees.tokens[index, path]
    columns["tokens"][index] = trees.tokens[index, 0]
    columns["tokens"][index, : last + 1] = tokens
    order = torch.arange(width, device=tokens.device)
    columns["parents"][index] = torch.where(order <= last, (order - 1).clamp(min=0), order)
    columns["depths"][index] = torch.where(order <= last, order, 0)
    columns["counts"][index] = last
    valid = trees.valid.clone()
    valid[index] = order <= last
    return replace(trees, valid=valid, **columns)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    scale = max(1.0, float(ours.float().abs().max()))
    return float((ours.float() - theirs.float()).abs().max()) / scale
