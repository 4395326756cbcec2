"""Sort keys and how to select the largest of them.

A key is an int64: a float32 value's order above, a tie-break below, so that no two keys of a row are equal.
The selection is a bitonic top-k (Shanbhag, Pirk, Madden: Efficient Top-K Query Processing on Massively
Parallel Hardware, SIGMOD 2018). The list is seen as a hypercube, one axis of length 2 for each index bit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

INTERPRETED_SHARED_MEMORY = 101_376
"""Shared memory of a block in bytes where no GPU says it: that of sm_120, the smallest among the targets."""

_KEY_BYTES = 8


@triton.jit
def pack_key(b_value, o_tie):
    """int64 keys that order as the float32 `b_value`; of equal values the lowest `o_tie` has the largest key.

    Signed zeros are equal. `o_tie` is below 2**32.
    """
    b_bits = tl.where(b_value == 0, 0.0, b_value).to(tl.int32, bitcast=True)
    b_order = tl.where(b_bits >= 0, b_bits, b_bits ^ 0x7FFFFFFF)
    return (b_order.to(tl.int64) << 32) | (0xFFFFFFFF - o_tie.to(tl.int64))


@triton.jit
def key_value(b_key):
    """The float32 value of a key."""
    b_order = (b_key >> 32).to(tl.int32)
    return tl.where(b_order >= 0, b_order, b_order ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def key_tie(b_key):
    """The tie-break of a key, int64."""
    return 0xFFFFFFFF - (b_key & 0xFFFFFFFF)


@triton.constexpr_function
def _log2(count):
    return count.bit_length() - 1


@triton.constexpr_function
def _cube(bits):
    return [2] * bits


@triton.constexpr_function
def _axis_shape(bits, bit):
    return [2 if axis == bits - 1 - bit else 1 for axis in range(bits)]


@triton.jit
def _bit_set(BITS: tl.constexpr, BIT: tl.constexpr):
    """Where the index has this bit set, broadcastable over the hypercube."""
    return tl.reshape(tl.arange(0, 2), _axis_shape(BITS, BIT)) == 1


@triton.jit
def _merge_runs(b_cube, BITS: tl.constexpr, RUN: tl.constexpr, b_rising):
    """Sort each bitonic run of 2**RUN keys: falling, or rising where `b_rising`."""
    for step in tl.static_range(RUN):
        b_partner = tl.sum(b_cube, axis=BITS - RUN + step, keep_dims=True) - b_cube
        is_upper = tl.reshape(tl.arange(0, 2), _axis_shape(BITS, RUN - 1 - step)) == 1
        takes_smaller = is_upper != b_rising
        b_cube = tl.where(takes_smaller == (b_partner < b_cube), b_partner, b_cube)
    return b_cube


@triton.jit
def largest_keys(b_key, COUNT: tl.constexpr, RISING: tl.constexpr = False, SORTED: tl.constexpr = 1):
    """The COUNT largest of a list of keys, falling, or rising if RISING; lengths are powers of two.

    The list may come in sorted runs of SORTED keys, at most COUNT, falling and rising in turn.
    """
    bits: tl.constexpr = _log2(b_key.numel)
    run: tl.constexpr = _log2(COUNT)
    b_cube = tl.reshape(b_key, _cube(bits))
    for i in tl.static_range(_log2(SORTED) + 1, run):
        b_cube = _merge_runs(b_cube, bits, i, _bit_set(bits, i))
    if bits == run:
        b_cube = _merge_runs(b_cube, bits, run, RISING)
    elif SORTED < COUNT:
        b_cube = _merge_runs(b_cube, bits, run, _bit_set(bits, run))
    for i in tl.static_range(bits - run):
        b_cube = tl.max(b_cube, axis=bits - 1 - i - run)
        if bits - 1 - i == run:
            b_cube = _merge_runs(b_cube, run, run, RISING)
        else:
            b_cube = _merge_runs(b_cube, bits - 1 - i, run, _bit_set(bits - 1 - i, run))
    return tl.reshape(b_cube, [COUNT])


@triton.jit
def in_turn(o_key, RUN: tl.constexpr):
    """Indices that read runs of RUN falling keys as falling and rising in turn."""
    return tl.where(o_key // RUN % 2 == 0, o_key, o_key // RUN * RUN + RUN - 1 - o_key % RUN)


@triton.jit
def merge_largest(b_falling, b_rising):
    """The larger half of a falling and a rising list of keys of one length, falling."""
    bits: tl.constexpr = _log2(b_falling.numel)
    b_cube = tl.reshape(tl.maximum(b_falling, b_rising), _cube(bits))
    return tl.reshape(_merge_runs(b_cube, bits, bits, False), [b_falling.numel])


@lru_cache(maxsize=16)
def largest_sort(device: torch.device) -> int:
    """How many keys one program may sort: a power of two whose keys fit the device's shared memory."""
    shared = INTERPRETED_SHARED_MEMORY
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return 1 << ((shared // _KEY_BYTES).bit_length() - 1)


def warps_for(keys: int) -> int:
    """Warps of a program that sorts this many keys: two to four keys a thread, 1 to 32 warps."""
    return max(1, min(32, keys // 64))
