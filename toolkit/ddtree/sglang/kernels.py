"""Triton kernels of one verify step around SGLang's forward: rows before it, walk and K/V move after it.

R requests, N + 1 = W rows each (root, nodes, padding), S + 1 = D slots of a draft block. No word to the host:
the batch's lengths are read on the device. Under TRITON_INTERPRET=1 they run on CPU tensors. Their plain
twins are `toolkit.ddtree.tree.ancestor_mask`, `positions`, and `toolkit.ddtree.walk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.ddtree.kernels.tree_builder import TreeLinks
from toolkit.ddtree.tree import DraftTrees

_ROWS = 16
_TILE_WORDS = 256
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Where the rows of a verification stand.

    Attributes:
        positions: int64 [R, W], the committed length plus the node's depth.
        slots: int64 [R, W], K/V cache rows.
        lengths: int64 [R], committed lengths.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor

    @classmethod
    def empty(cls, requests: int, width: int, device: Any) -> VerifyRows:
        """Room for R requests."""
        positions, slots = torch.empty((2, requests, width), dtype=torch.int64, device=device)
        return cls(positions, slots, torch.empty(requests, dtype=torch.int64, device=device))

    def first(self, requests: int) -> VerifyRows:
        """Those of the first requests."""
        return VerifyRows(self.positions[:requests], self.slots[:requests], self.lengths[:requests])


@dataclass(frozen=True, slots=True)
class Commit:
    """What a verify step commits.

    Attributes:
        tokens: int64 [R, D], matched tokens, then the bonus token, then 0.
        lengths: int32 [R], how many of them, the bonus token included.
        bonus: int64 [R], the next root.
        seq_lens: int64 [R], committed lengths after it.
        rows: int64 [R, D], the flat row (request * W + node) of the accepted node of each depth; the row of
            the depth's own number beyond the accepted ones.
        sources: int64 [R, D], the K/V cache rows of these nodes.
        packed: int64, one after another: tokens, bonus, seq_lens and lengths (what a step tells others), then
            rows and sources; the others are views of it.
    """

    tokens: Tensor
    lengths: Tensor
    bonus: Tensor
    seq_lens: Tensor
    rows: Tensor
    sources: Tensor
    packed: Tensor

    @classmethod
    def empty(cls, requests: int, depths: int, device: Any) -> Commit:
        """Room for R requests of D tokens."""
        cells = requests * depths
        packed = torch.empty(3 * (cells + requests), dtype=torch.int64, device=device)
        parts = packed.split([cells, requests, requests, requests, cells, cells])
        tokens, rows, sources = (part.view(requests, depths) for part in (parts[0], parts[4], parts[5]))
        return cls(tokens, parts[3].view(torch.int32)[:requests], parts[1], parts[2], rows, sources, packed)

    def told(self) -> Commit:
        """The same, with copies of what a step tells others; `rows` and `sources` stay where they are."""
        requests, depths = self.tokens.shape
        packed = self.packed[: requests * (depths + 3)].clone()
        tokens, bonus, seq_lens, lengths = packed.split([requests * depths, requests, requests, requests])
        lengths = lengths.view(torch.int32)[:requests]
        tokens = tokens.view(requests, depths)
        return Commit(tokens, lengths, bonus, seq_lens, self.rows, self.sources, packed)


def place_rows(
    trees: DraftTrees, links: TreeLinks, seq_lens: Tensor, req_to_token: Tensor, req_pool_indices: Tensor,
    mask: Tensor, rows: VerifyRows | None = None,
) -> VerifyRows:  # fmt: skip
    """Find positions and cache rows of the trees, and write who sees whom into `mask`.

    The mask is SGLang's FULL_MASK: one request after another, W rows of (length + W) columns. Only the last W
    columns of each row are written: the prefix, which every row sees, is not read by the kernels in use.

    Args:
        trees: the trees.
        links: their links.
        seq_lens: int [R], committed lengths.
        req_to_token: int32 [requests, positions], SGLang's table of cache rows.
        req_pool_indices: int [R], the rows of that table.
        mask: bool or uint8, flat, at least sum(W * (length + W)) long.
        rows: where to write them; None: new tensors.
    """
    requests, width = trees.parents.shape
    if rows is None:
        rows = VerifyRows.empty(requests, width, trees.parents.device)
    _place_kernel[(requests, triton.cdiv(width, _ROWS))](
        links.ancestors, trees.depths, seq_lens, req_to_token, req_pool_indices,
        mask.view(torch.uint8), rows.positions, rows.slots, rows.lengths,
        width, links.ancestors.shape[2], req_to_token.stride(0), req_to_token.shape[1],
        REQUESTS_PAD=triton.next_power_of_2(requests), WIDTH_PAD=triton.next_power_of_2(width), ROWS=_ROWS,
        num_warps=4,
    )  # fmt: skip
    return rows


@triton.jit
def _place_kernel(
    p_ancestors, p_depth, p_seq_len, p_req_to_token, p_req, p_mask, p_position, p_slot, p_length,
    width, words, table_stride, table_width,
    REQUESTS_PAD: tl.constexpr, WIDTH_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Positions, cache rows and mask of ROWS rows of one request."""
    i_request = tl.program_id(0).to(tl.int64)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_column = tl.arange(0, WIDTH_PAD)
    is_row = o_row < width
    length = tl.load(p_seq_len + i_request).to(tl.int64)

    if tl.program_id(1) == 0:
        tl.store(p_length + i_request, length)
    b_depth = tl.load(p_depth + i_request * width + o_row, mask=is_row, other=0)
    tl.store(p_position + i_request * width + o_row, length + b_depth, mask=is_row)
    p_table = p_req_to_token + tl.load(p_req + i_request).to(tl.int64) * table_stride
    in_table = is_row & (length + o_row < table_width)
    b_slot = tl.load(p_table + length + o_row, mask=in_table, other=0)
    tl.store(p_slot + i_request * width + o_row, b_slot.to(tl.int64), mask=is_row)

    o_before = tl.arange(0, REQUESTS_PAD)
    b_before = tl.load(p_seq_len + o_before, mask=o_before < i_request, other=0).to(tl.int64)
    start = (tl.sum(b_before, axis=0) + i_request * width) * width
    is_cell = is_row[:, None] & (o_column < width)[None, :]
    o_word = (i_request * width + o_row)[:, None] * words + (o_column // 64)[None, :]
    b_word = tl.load(p_ancestors + o_word, mask=is_cell, other=0)
    b_seen = (b_word >> (o_column % 64).to(tl.int64)[None, :]) & 1
    o_cell = start + o_row[:, None] * (length + width) + length + o_column[None, :]
    tl.store(p_mask + o_cell, b_seen.to(tl.uint8), mask=is_cell)


def walk_trees(
    trees: DraftTrees, target_tokens: Tensor, slots: Tensor, seq_lens: Tensor, depths: int,
    commit: Commit | None = None,
) -> Commit:  # fmt: skip
    """Follow, from each root, the child that holds the target's token, until no child does.

    Args:
        trees: the verified trees.
        target_tokens: int64 [R, W], the target's token after each row; what padding holds does not matter.
        slots: int64 [R, W], K/V cache rows.
        seq_lens: int [R], committed lengths.
        depths: D, the width of the result: the most tokens a step commits.
        commit: where to write it; None: new tensors.
    """
    requests, width = trees.parents.shape
    if commit is None:
        commit = Commit.empty(requests, depths, trees.parents.device)
    width_pad = triton.next_power_of_2(width)
    _walk_kernel[(requests,)](
        trees.tokens, trees.parents, trees.counts, target_tokens, slots, seq_lens,
        commit.tokens, commit.lengths, commit.bonus, commit.seq_lens, commit.rows, commit.sources,
        width, depths,
        WIDTH_PAD=width_pad, DEPTHS_PAD=triton.next_power_of_2(depths),
        num_warps=max(1, min(8, width_pad // 128)),
    )  # fmt: skip
    return commit


@triton.jit
def _walk_kernel(
    p_token, p_parent, p_count, p_target, p_slot, p_seq_len,
    p_out, p_length, p_bonus, p_new_len, p_row, p_source,
    width, depths,
    WIDTH_PAD: tl.constexpr, DEPTHS_PAD: tl.constexpr,
):  # fmt: skip
    """The walk of one request."""
    i_request = tl.program_id(0).to(tl.int64)
    i_first = i_request * width
    o_node = tl.arange(0, WIDTH_PAD)
    o_depth = tl.arange(0, DEPTHS_PAD)
    count = tl.load(p_count + i_request)
    # What a graph that was captured and never ran leaves as a count may be anything.
    is_node = (o_node > 0) & (o_node <= count) & (o_node < width)
    b_token = tl.load(p_token + i_first + o_node, mask=is_node, other=-1)
    b_parent = tl.load(p_parent + i_first + o_node, mask=is_node, other=-1)
    b_target = tl.load(p_target + i_first + o_node, mask=o_node < width, other=-1)

    node = tl.full([], 0, tl.int64)
    accepted = tl.full([], 0, tl.int32)
    b_path = o_depth.to(tl.int64)
    b_path = tl.where(o_depth == 0, 0, b_path)
    wanted = tl.sum(tl.where(o_node == 0, b_target, 0), axis=0)
    b_out = tl.where(o_depth == 0, wanted, 0)
    for i_depth in range(1, depths):
        is_match = is_node & (b_parent == node) & (b_token == wanted)
        child = tl.min(tl.where(is_match, o_node, WIDTH_PAD), axis=0)
        is_found = child < WIDTH_PAD
        after = tl.sum(tl.where(o_node == child, b_target, 0), axis=0)
        is_here = (o_depth == i_depth) & is_found
        b_path = tl.where(is_here, child.to(tl.int64), b_path)
        b_out = tl.where(is_here, after, b_out)
        accepted += is_found.to(tl.int32)
        # A node without a match has no children either: -2 is nobody's parent.
        node = tl.where(is_found, child.to(tl.int64), -2)
        wanted = tl.where(is_found, after, wanted)

    is_depth = o_depth < depths
    tl.store(p_out + i_request * depths + o_depth, b_out, mask=is_depth)
    tl.store(p_row + i_request * depths + o_depth, i_first + b_path, mask=is_depth)
    b_source = tl.load(p_slot + i_first + b_path, mask=is_depth, other=0)
    tl.store(p_source + i_request * depths + o_depth, b_source, mask=is_depth)
    tl.store(p_length + i_request, accepted + 1)
    tl.store(p_bonus + i_request, wanted)
    tl.store(p_new_len + i_request, tl.load(p_seq_len + i_request).to(tl.int64) + accepted + 1)


class RowMover:
    """Copies cache rows in several buffers at once.

    Args:
        buffers: one tensor [rows, ...] for each layer's K, V or latent, contiguous, on one device; held, for
            the kernel reads their addresses.

    Raises:
        ValueError: a buffer is not contiguous, or a row is not a multiple of four bytes.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        sizes = [buffer[0].numel() * buffer.element_size() for buffer in buffers]
        for buffer, size in zip(buffers, sizes, strict=True):
            if not buffer.is_contiguous() or size % _WORD_BYTES:
                raise ValueError(f"K/V rows of {size} bytes, strides {buffer.stride()}, cannot be moved")
        device = buffers[0].device
        words = [size // _WORD_BYTES for size in sizes]
        self._buffers = list(buffers)
        self._addresses = torch.tensor([x.data_ptr() for x in buffers], dtype=torch.int64, device=device)
        self._words = torch.tensor(words, dtype=torch.int32, device=device)
        self._tiles = triton.cdiv(max(words), _TILE_WORDS)

    def __call__(self, sources: Tensor, targets: Tensor) -> None:
        """Copy as if every source were read before any target is written.

        The rows of one request are read and written by one program a tile, so a row that is the target of one
        node and the source of another needs no order between programs. Requests share no rows.

        Args:
            sources: int64 [R, D], contiguous.
            targets: int64 [R, D], contiguous; where it is the source, nothing moves.
        """
        requests, depths = sources.shape
        _move_kernel[(requests, len(self._buffers), self._tiles)](
            self._addresses, self._words, sources, targets, depths,
            DEPTHS_PAD=triton.next_power_of_2(depths), TILE=_TILE_WORDS, num_warps=4,
        )  # fmt: skip


@triton.jit
def _move_kernel(
    p_buffers, p_words, p_source, p_target, depths,
    DEPTHS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of the rows of one request in one buffer."""
    i_request = tl.program_id(0).to(tl.int64)
    i_buffer = tl.program_id(1)
    words = tl.load(p_words + i_buffer).to(tl.int64)
    p_buffer = tl.load(p_buffers + i_buffer).to(tl.pointer_type(tl.int32))
    o_depth = tl.arange(0, DEPTHS_PAD)
    o_word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    b_source = tl.load(p_source + i_request * depths + o_depth, mask=o_depth < depths, other=0)
    b_target = tl.load(p_target + i_request * depths + o_depth, mask=o_depth < depths, other=0)
    moves = (b_source != b_target)[:, None] & (o_word < words)[None, :]
    b_words = tl.load(p_buffer + b_source[:, None] * words + o_word[None, :], mask=moves, other=0)
    tl.debug_barrier()  # a row read by one thread is written by another
    tl.store(p_buffer + b_target[:, None] * words + o_word[None, :], b_words, mask=moves)
