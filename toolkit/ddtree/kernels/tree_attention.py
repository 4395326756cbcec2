"""Attention of a verification: the rows of each request's tree over its cached prefix and over each other.

Prefix and tree are one softmax. Rows of all query heads that share a K/V head stand in one tile, so each
cached row is read once for all of them; the prefix is cut into splits that run side by side and are merged
by their log-sum-exp, as in Flash-Decoding (Dao et al., 2023). Under TRITON_INTERPRET=1 it runs on CPU
tensors. Its plain twin is `torch.nn.functional.scaled_dot_product_attention` with the tree's mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 16
_MERGE_ROWS = 4
_NARROW, _WIDEST = 64, 128  # heads between them are read further ahead, those beyond take smaller tiles


class Sees(IntEnum):
    """What a row of the tree sees of the other rows."""

    ALL = 0
    EARLIER = 1
    """Itself and the rows before it, as in a chain."""
    MASKED = 2
    """What the mask says."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached rows of a batch of R requests.

    Attributes:
        keys: [cache rows, K/V heads, Dk], of the queries' dtype or float8, the last dimension contiguous.
        values: [cache rows, K/V heads, Dv], likewise.
        starts: int [R + 1], where each request's part of `rows` begins; the last is where it ends.
        rows: int [sum of lengths or more], cache rows in the order of their positions.
        key_scale: what cached keys are multiplied with.
        value_scale: what cached values are multiplied with.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor
    rows: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Mask:
    """SGLang's FULL_MASK: one request after another, W rows of (length + W) columns, true where a row sees.

    Only the last W columns of a row are read.

    Attributes:
        cells: bool or uint8, flat.
        starts: int [R or more], where each request's part begins.
    """

    cells: Tensor
    starts: Tensor


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, prefix: Prefix, scale: float,
    sees: Sees, mask: Mask | None = None, splits: int | None = None,
) -> None:  # fmt: skip
    """Write softmax(scale * Q K^T) V into `out`, over each request's prefix and tree.

    Every request has the same number of rows, W. No synchronisation with the host: lengths are read on the
    device, the launch depends on shapes alone.

    Args:
        query: [R * W, heads, Dk], float32, bfloat16 or float16, the last dimension contiguous.
        key: [R * W, K/V heads, Dk], the tree's own, of the same dtype.
        value: [R * W, K/V heads, Dv], likewise.
        out: [R * W, heads, Dv], of the same dtype.
        prefix: the cached rows.
        scale: of the scores.
        sees: what a row sees of the tree.
        mask: where `sees` is MASKED.
        splits: of the prefix; None chooses by the size of the device.

    Raises:
        ValueError: `sees` is MASKED without a mask, the rows are no whole number for each request, or heads
            are so wide that no tile of them fits the device; see `fits`.
    """
    requests = prefix.starts.shape[0] - 1
    rows, heads, key_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[2]
    if requests < 1 or rows % requests or heads % kv_heads:
        raise ValueError(
            f"{rows} rows of {heads} heads do not fit {requests} requests and {kv_heads} K/V heads"
        )
    if sees is Sees.MASKED and mask is None:
        raise ValueError("the tree is masked, and there is no mask")
    if not rows:
        return
    width, group = rows // requests, heads // kv_heads
    main, rest = _halves(key_dim)
    once = value_dim == main and _are_one(prefix)
    tile, abreast = _INTERPRETED, 1
    if query.is_cuda:
        shared = _shared_memory(query.device)
        tile = _tile(width * group, key_dim, value_dim, query.element_size(), shared, once=once)
        abreast = _processors(query.device) * (1 if max(key_dim, value_dim) > _WIDEST else 2)
    blocks = triton.cdiv(width * group, tile.rows)
    if splits is None:
        splits = _splits(requests * kv_heads * blocks, abreast)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((splits, rows, heads, value_dim), dtype=torch.float32, device=query.device)
        sums = torch.empty((splits, rows, heads), dtype=torch.float32, device=query.device)
    cells, mask_starts = (mask.cells, mask.starts) if mask is not None else (query, prefix.starts)
    _split_kernel[(requests, kv_heads * blocks, splits)](
        query, key, value, out, parts, sums,
        prefix.keys, prefix.values, prefix.starts, prefix.rows, cells, mask_starts,
        scale * _LOG2_E, prefix.key_scale, prefix.value_scale, width, rows, heads,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), prefix.keys.stride(0), prefix.keys.stride(1),
        prefix.values.stride(0), prefix.values.stride(1),
        GROUP=group, BLOCKS=blocks, SPLITS=splits, SEES=int(sees),
        KEY_DIM=key_dim, MAIN=main, REST=rest, VALUE_DIM=value_dim,
        VALUE_PAD=triton.next_power_of_2(value_dim), ROWS=tile.rows, COLUMNS=tile.columns,
        EXACT=query.dtype == torch.float32, ONCE=once, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(triton.cdiv(rows * heads, _MERGE_ROWS),)](
            parts, sums, out, prefix.starts, width, rows, heads, out.stride(0), out.stride(1),
            SPLITS=splits, COLUMNS=tile.columns, VALUE_DIM=value_dim,
            VALUE_PAD=triton.next_power_of_2(value_dim), ROWS=_MERGE_ROWS, num_warps=4,
        )  # fmt: skip


def _are_one(prefix: Prefix) -> bool:
    """Whether cached values are the first numbers of their keys, as with latent attention."""
    keys, values = prefix.keys, prefix.values
    same = keys.data_ptr() == values.data_ptr() and keys.dtype == values.dtype
    return same and keys.stride()[:2] == values.stride()[:2]


def fits(query: Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether the device of these queries has room for a tile of such heads."""
    if not query.is_cuda:
        return True
    try:
        _tile(16, key_dim, value_dim, query.element_size(), _shared_memory(query.device))
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    columns: int
    warps: int
    stages: int


_INTERPRETED = _Tile(64, 128, 1, 1)
"""On a CPU, where a program costs more than its numbers."""


def _tile(rows: int, key_dim: int, value_dim: int, item: int, shared: int, *, once: bool = False) -> _Tile:
    """The tile of a program: few rows are not padded to many, and what it reads fits the shared memory.

    What is tried first was the fastest on an H200; see benchmarks/tree_attention_tune_h200.json.

    Args:
        rows: of one request and K/V head.
        key_dim: Dk.
        value_dim: Dv.
        item: bytes of a number.
        shared: bytes of shared memory that a program may have.
        once: a cached row's value is the first part of its key, and is not read for itself.

    Raises:
        ValueError: the smallest does not fit either.
    """
    wide, exact = max(key_dim, value_dim) > _WIDEST, item > 2
    query = sum(_halves(key_dim)) * item
    row = query + triton.next_power_of_2(value_dim) * item
    cached = query if once else row
    for most, columns, stages in _tiles(wide=wide, exact=exact, narrow=max(key_dim, value_dim) <= _NARROW):
        own = max(16, min(most, triton.next_power_of_2(rows)))
        # Three passes of TF32 hold more than one of half the precision: twice a tile, and up to an eighth.
        held, room = (max(stages, 2), shared * 8 // 9) if exact else (stages, shared)
        if max(columns * held * cached, columns * row) + own * query <= room:
            return _Tile(own, columns, 8 if wide else 4, stages)
    raise ValueError(
        f"keys of {key_dim} and values of {value_dim} do not fit {shared} bytes of shared memory"
    )


def _tiles(*, wide: bool, exact: bool, narrow: bool) -> list[tuple[int, int, int]]:
    """Rows, columns and stages, the fastest first."""
    if exact:
        return [(rows, *rest) for rest in ((32, 2), (32, 1), (16, 1)) for rows in (32, 16)]
    if wide:  # rows before stages: each block of rows reads the whole prefix again
        piped = [(rows, 32, stages) for rows in (64, 32, 16) for stages in (3, 2)]
        return piped + [(rows, columns, 1) for columns in (32, 16) for rows in (32, 16)]
    several = () if narrow else ((64, 3),)
    return [(rows, *rest) for rest in (*several, (64, 2), (32, 2), (32, 1)) for rows in (64, 16)]


def _halves(dim: int) -> tuple[int, int]:
    """A head's size as a power of two and a padded rest: 576 is 512 and 64, 128 is 128 and 0."""
    main = triton.next_power_of_2(dim)
    if main == dim or main <= _WIDEST:
        return main, 0
    return main // 2, max(16, triton.next_power_of_2(dim - main // 2))


def _splits(programs: int, abreast: int) -> int:
    """How often the prefix is cut: programs run in waves, and each costs a part of its own besides.

    Args:
        programs: of the launch with a single split.
        abreast: programs that the device runs at once.
    """
    # An eighth of the whole prefix stands for what does not shrink with it: queries, tree, merge.
    return min(range(1, _MOST_SPLITS + 1), key=lambda n: -(-programs * n // abreast) * (1 / n + 1 / 8))


@lru_cache(maxsize=8)
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _attend(
    b_query, b_rest, b_key, b_key_rest, b_value, b_seen, scale, b_peak, b_sum, b_out,
    REST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of columns: scores, running maximum (in powers of two), sum, and weighted values."""
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"
    b_score = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)
    if REST > 0:
        b_score = tl.dot(b_rest, tl.trans(b_key_rest), b_score, input_precision=PRECISION)
    b_score = tl.where(b_seen, b_score * scale, float("-inf"))
    b_next = tl.maximum(b_peak, tl.max(b_score, axis=1))
    b_shift = tl.where(b_next == float("-inf"), 0.0, b_next)
    b_weight = tl.exp2(b_score - b_shift[:, None])
    b_keep = tl.exp2(b_peak - b_shift)
    b_sum = b_sum * b_keep + tl.sum(b_weight, axis=1)
    # Added onto what is there, not beside it: the tile of results is most of a program's registers.
    b_out = tl.dot(b_weight.to(b_value.dtype), b_value, b_out * b_keep[:, None], input_precision=PRECISION)
    return b_next, b_sum, b_out


@triton.jit
def _over_tree(
    p_key, p_value, p_cell, p_mask_start, b_query, b_rest, o_node, is_row, i_request, i_kv, length,
    scale, width, key_row, key_head, value_row, value_head, b_peak, b_sum, b_out,
    SEES: tl.constexpr, KEY_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The rows of a tile over the tree's own rows."""
    REST_PAD: tl.constexpr = REST if REST > 0 else 16
    o_dim, o_rest, o_value = tl.arange(0, MAIN), MAIN + tl.arange(0, REST_PAD), tl.arange(0, VALUE_PAD)
    is_dim, is_rest, is_value = o_dim < KEY_DIM, o_rest < KEY_DIM, o_value < VALUE_DIM
    p_cells = p_cell
    if SEES == 2:
        p_cells = p_cell + tl.load(p_mask_start + i_request).to(tl.int64) + length
    for i_first in tl.range(0, width, COLUMNS, num_stages=1):
        o_other = i_first + tl.arange(0, COLUMNS)
        is_column = o_other < width
        p_row = p_key + ((i_request * width + o_other) * key_row + i_kv * key_head)[:, None]
        b_key = tl.load(p_row + o_dim[None, :], mask=is_column[:, None] & is_dim[None, :], other=0.0)
        b_key_rest = b_key
        if REST > 0:
            b_key_rest = tl.load(
                p_row + o_rest[None, :], mask=is_column[:, None] & is_rest[None, :], other=0.0
            )
        p_row = p_value + ((i_request * width + o_other) * value_row + i_kv * value_head)[:, None]
        b_value = tl.load(p_row + o_value[None, :], mask=is_column[:, None] & is_value[None, :], other=0.0)
        is_seen = is_row[:, None] & is_column[None, :]
        if SEES == 1:
            is_seen = is_seen & (o_other[None, :] <= o_node[:, None])
        if SEES == 2:
            o_cell = o_node.to(tl.int64)[:, None] * (length + width) + o_other[None, :]
            is_seen = is_seen & (tl.load(p_cells + o_cell, mask=is_seen, other=0) != 0)
        b_peak, b_sum, b_out = _attend(
            b_query, b_rest, b_key, b_key_rest, b_value, is_seen,
            scale, b_peak, b_sum, b_out, REST, EXACT,
        )  # fmt: skip
    return b_peak, b_sum, b_out


@triton.jit
def _split_kernel(
    p_query, p_key, p_value, p_out, p_part, p_log,
    p_cached_key, p_cached_value, p_start, p_cached_row, p_cell, p_mask_start,
    scale, key_scale, value_scale, width, rows, heads,
    query_row, query_head, key_row, key_head, value_row, value_head, out_row, out_head,
    cached_key_row, cached_key_head, cached_value_row, cached_value_head,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, SEES: tl.constexpr,
    KEY_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one request and K/V head over one split of its prefix; the last split has the tree too."""
    i_request = tl.program_id(0).to(tl.int64)
    i_kv = (tl.program_id(1) // BLOCKS).to(tl.int64)
    i_split = tl.program_id(2)
    o_row = (tl.program_id(1) % BLOCKS) * ROWS + tl.arange(0, ROWS)
    o_node = o_row // GROUP
    o_head = i_kv * GROUP + o_row % GROUP
    is_row = o_node < width
    o_token = i_request * width + o_node
    REST_PAD: tl.constexpr = REST if REST > 0 else 16
    o_dim, o_rest, o_value = tl.arange(0, MAIN), MAIN + tl.arange(0, REST_PAD), tl.arange(0, VALUE_PAD)
    is_dim, is_rest, is_value = o_dim < KEY_DIM, o_rest < KEY_DIM, o_value < VALUE_DIM
    p_row = p_query + (o_token * query_row + o_head * query_head)[:, None]
    b_query = tl.load(p_row + o_dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    b_rest = b_query
    if REST > 0:
        b_rest = tl.load(p_row + o_rest[None, :], mask=is_row[:, None] & is_rest[None, :], other=0.0)

    start = tl.load(p_start + i_request).to(tl.int64)
    length = tl.load(p_start + i_request + 1).to(tl.int64) - start
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), COLUMNS) * COLUMNS
    first = i_split * chunk
    last = tl.minimum(first + chunk, length)
    b_peak = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_out = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    o_column = tl.arange(0, COLUMNS)

    for i_first in range(first, last, COLUMNS):
        is_column = i_first + o_column < last
        o_cached = tl.load(p_cached_row + start + i_first + o_column, mask=is_column, other=0).to(tl.int64)
        p_cached = p_cached_key + (o_cached * cached_key_row + i_kv * cached_key_head)[:, None]
        b_key = tl.load(p_cached + o_dim[None, :], mask=is_column[:, None] & is_dim[None, :], other=0.0)
        b_key = b_key.to(b_query.dtype)
        b_key_rest = b_key
        if REST > 0:
            b_key_rest = tl.load(
                p_cached + o_rest[None, :], mask=is_column[:, None] & is_rest[None, :], other=0.0
            ).to(b_query.dtype)
        if ONCE:
            b_value = b_key
        else:
            p_cached = p_cached_value + (o_cached * cached_value_row + i_kv * cached_value_head)[:, None]
            b_value = tl.load(
                p_cached + o_value[None, :], mask=is_column[:, None] & is_value[None, :], other=0.0
            )
        b_peak, b_sum, b_out = _attend(
            b_query, b_rest, b_key, b_key_rest, b_value.to(b_query.dtype),
            is_row[:, None] & is_column[None, :], scale * key_scale, b_peak, b_sum, b_out, REST, EXACT,
        )  # fmt: skip
    b_out = b_out * value_scale  # of the prefix alone

    if i_split == SPLITS - 1:
        b_peak, b_sum, b_out = _over_tree(
            p_key, p_value, p_cell, p_mask_start, b_query, b_rest, o_node, is_row, i_request, i_kv, length,
            scale, width, key_row, key_head, value_row, value_head, b_peak, b_sum, b_out,
            SEES, KEY_DIM, MAIN, REST, VALUE_DIM, VALUE_PAD, COLUMNS, EXACT,
        )  # fmt: skip

    b_out = b_out / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    is_cell = is_row[:, None] & is_value[None, :]
    if SPLITS == 1:
        p_result = p_out + (o_token * out_row + o_head * out_head)[:, None] + o_value[None, :]
        tl.store(p_result, b_out.to(p_out.dtype.element_ty), mask=is_cell)
    elif (first < length) | (i_split == SPLITS - 1):  # the merge reads no other
        o_place = (i_split * rows + o_token) * heads + o_head
        tl.store(p_part + o_place[:, None] * VALUE_DIM + o_value[None, :], b_out, mask=is_cell)
        b_log = tl.where(b_sum > 0, b_peak + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), float("-inf"))
        tl.store(p_log + o_place, b_log, mask=is_row)


@triton.jit
def _merge_kernel(
    p_part, p_log, p_out, p_start, width, rows, heads, out_row, out_head,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS rows, heads counted as rows."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_value = tl.arange(0, VALUE_PAD)
    rows = tl.cast(rows, tl.int64)  # a single row is a constant, which has no method
    is_row = o_row < rows * heads
    o_token = o_row // heads
    o_request = o_token // width
    b_start = tl.load(p_start + o_request, mask=is_row, other=0)
    b_length = tl.load(p_start + o_request + 1, mask=is_row, other=0) - b_start
    b_chunk = tl.cdiv(tl.cdiv(b_length, SPLITS), COLUMNS) * COLUMNS
    is_cell = is_row[:, None] & (o_value < VALUE_DIM)[None, :]
    b_peak = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_out = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for i_split in range(SPLITS):
        is_there = is_row & ((i_split * b_chunk < b_length) | (i_split == SPLITS - 1))
        o_place = i_split * rows * heads + o_row
        b_log = tl.load(p_log + o_place, mask=is_there, other=float("-inf"))
        b_next = tl.maximum(b_peak, b_log)
        b_shift = tl.where(b_next == float("-inf"), 0.0, b_next)
        b_keep, b_weight = tl.exp2(b_peak - b_shift), tl.exp2(b_log - b_shift)
        o_part = o_place[:, None] * VALUE_DIM + o_value[None, :]
        b_part = tl.load(p_part + o_part, mask=is_cell & is_there[:, None], other=0.0)
        b_out = b_out * b_keep[:, None] + b_part * b_weight[:, None]
        b_sum = b_sum * b_keep + b_weight
        b_peak = b_next
    b_out = b_out / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_result = p_out + (o_token * out_row + (o_row % heads) * out_head)[:, None] + o_value[None, :]
    tl.store(p_result, b_out.to(p_out.dtype.element_ty), mask=is_cell)
