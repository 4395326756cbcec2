"""Where the attention of a verification finds its rows, by one launch.

Under TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512
_SLICES = 16


def plan_verification(
    seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor, width: int,
    row_starts: Tensor, prefix_starts: Tensor, mask_starts: Tensor, prefix_rows: Tensor,
) -> None:  # fmt: skip
    """Write where each request's rows, prefix and mask begin, and the cache rows of its prefix.

    Args:
        seq_lens: int [R], committed lengths.
        req_pool_indices: int [R], rows of `req_to_token`.
        req_to_token: int32 [requests, positions], SGLang's table of cache rows.
        width: W, rows a request.
        row_starts: int [R + 1], written: multiples of W.
        prefix_starts: int [R + 1], written: sums of lengths.
        mask_starts: int [R + 1], written: sums of W * (length + W).
        prefix_rows: int, at least as long as the sum of lengths, written.
    """
    requests = len(seq_lens)
    _plan_kernel[(requests, _SLICES)](
        seq_lens, req_pool_indices, req_to_token, row_starts, prefix_starts, mask_starts, prefix_rows,
        width, req_to_token.stride(0),
        REQUESTS_PAD=triton.next_power_of_2(requests), BLOCK=_BLOCK, SLICES=_SLICES, num_warps=4,
    )  # fmt: skip


@triton.jit
def _plan_kernel(
    p_length, p_request, p_table, p_row_start, p_prefix_start, p_mask_start, p_prefix_row,
    width, table_stride,
    REQUESTS_PAD: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """One slice of the prefix of one request; the first slice also writes where things begin."""
    i_request = tl.program_id(0)
    i_slice = tl.program_id(1)
    o_before = tl.arange(0, REQUESTS_PAD)
    b_before = tl.load(p_length + o_before, mask=o_before < i_request, other=0).to(tl.int64)
    start = tl.sum(b_before, axis=0)
    length = tl.load(p_length + i_request).to(tl.int64)
    if i_slice == 0:
        if i_request == 0:
            tl.store(p_row_start, 0)
            tl.store(p_prefix_start, 0)
            tl.store(p_mask_start, 0)
        rows = (i_request + 1).to(tl.int64) * width
        tl.store(p_row_start + i_request + 1, rows)
        tl.store(p_prefix_start + i_request + 1, start + length)
        tl.store(p_mask_start + i_request + 1, (start + length + rows) * width)
    p_own = p_table + tl.load(p_request + i_request).to(tl.int64) * table_stride
    for i_first in range(i_slice * BLOCK, length, SLICES * BLOCK):
        o_place = i_first + tl.arange(0, BLOCK)
        is_there = o_place < length
        b_row = tl.load(p_own + o_place, mask=is_there, other=0)
        tl.store(p_prefix_row + start + o_place, b_row, mask=is_there)
