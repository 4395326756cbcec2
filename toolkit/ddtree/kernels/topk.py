"""Top-k tokens and their log-probabilities over the vocabulary, in one pass over the logits.

The first kernel cuts each row into chunks and leaves each chunk's k best as sort keys, with the chunk's
maximum and its sum of exponentials. The second merges the chunks' keys, in rounds when they are many, and in
the last round turns them into tokens and log-probabilities. The plain reference is
`toolkit.ddtree.tree.topk_logprobs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.ddtree.kernels.keys import (
    in_turn,
    key_tie,
    key_value,
    largest_keys,
    largest_sort,
    pack_key,
    warps_for,
)

_CHUNK = 2048
_GROUP = 8
_MERGED = 4096


@triton.jit
def _chunk_kernel(
    p_logits, p_keys, p_max, p_sum,
    row_stride, vocabulary, chunks,
    K_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Keys [rows, chunks, K_PAD], maximum and sum of exponentials [rows, chunks] of one chunk.

    GROUPED: the k best tokens lie in the k groups of tokens with the best maxima, the first of equal groups
    counting as better; so only the maxima are sorted, and then the members of k groups.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    p_row = p_logits + i_row * row_stride
    o_group = i_chunk * GROUPS + tl.arange(0, GROUPS)
    o_token = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_logit = tl.load(p_row + o_token, mask=o_token < vocabulary, other=float("-inf")).to(tl.float32)
    b_number = tl.where(b_logit == b_logit, b_logit, float("-inf"))
    b_group = tl.max(b_number, axis=1)
    b_max = tl.max(b_group, axis=0)
    b_shift = tl.where(tl.abs(b_max) < float("inf"), b_max, 0.0)
    b_sum = tl.sum(tl.sum(tl.exp(b_logit - b_shift), axis=1), axis=0)
    i_out = i_row * chunks + i_chunk
    tl.store(p_max + i_out, b_max)
    tl.store(p_sum + i_out, b_sum)

    if GROUPED:
        o_best = key_tie(largest_keys(pack_key(b_group, o_group), K_PAD))
        o_member = o_best[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        b_member = tl.load(p_row + o_member, mask=o_member < vocabulary, other=float("-inf")).to(tl.float32)
        b_top = largest_keys(tl.reshape(pack_key(b_member, o_member), [K_PAD * GROUP]), K_PAD)
    else:
        b_top = largest_keys(tl.reshape(pack_key(b_logit, o_token), [GROUPS * GROUP]), K_PAD)
    tl.store(p_keys + i_out * K_PAD + tl.arange(0, K_PAD), b_top)


@triton.jit
def _merge_kernel(
    p_keys, p_merged, p_max, p_sum, p_logprob, p_token,
    lists, merged_lists, chunks, k,
    K_PAD: tl.constexpr, FAN_IN: tl.constexpr, CHUNKS_PAD: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Merge FAN_IN lists of keys into one: [rows, lists, K_PAD] -> [rows, merged_lists, K_PAD].

    In the LAST round there is one list; it becomes log-probabilities and tokens [rows, k].
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_list = tl.program_id(1)
    o_key = tl.arange(0, FAN_IN * K_PAD)
    o_list = i_list * FAN_IN + o_key // K_PAD
    p_first = p_keys + (i_row * lists + i_list * FAN_IN) * K_PAD
    b_key = tl.load(p_first + in_turn(o_key, K_PAD), mask=o_list < lists, other=-0x8000000000000000)
    b_top = largest_keys(b_key, K_PAD, SORTED=K_PAD)
    o_top = tl.arange(0, K_PAD)
    if LAST:
        o_chunk = tl.arange(0, CHUNKS_PAD)
        b_max = tl.load(p_max + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=float("-inf"))
        b_sum = tl.load(p_sum + i_row * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
        b_peak = tl.max(b_max, axis=0)
        b_shift = tl.where(tl.abs(b_peak) < float("inf"), b_peak, 0.0)
        b_total = tl.sum(b_sum * tl.exp(b_max - b_shift), axis=0)
        is_number = (b_total > 0) & (b_total < float("inf"))
        b_lse = b_shift + tl.log(tl.where(is_number, b_total, 1.0))
        b_logprob = tl.where(is_number, key_value(b_top) - b_lse, float("nan"))
        b_logprob = tl.where(b_logprob > 0, 0.0, b_logprob)
        tl.store(p_logprob + i_row * k + o_top, b_logprob, mask=o_top < k)
        tl.store(p_token + i_row * k + o_top, key_tie(b_top), mask=o_top < k)
    else:
        tl.store(p_merged + (i_row * merged_lists + i_list) * K_PAD + o_top, b_top)


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row and their log-probabilities; ranks as the reference does.

    Args:
        logits: [..., V], float32, bfloat16 or float16, the last dimension contiguous.
        k: candidates, 1 .. V, at most 2048.

    Returns:
        log-probabilities float32 [..., k], falling, and tokens int64 [..., k]. Those of a row that holds NaN
        or +inf are NaN, its tokens are any. No synchronisation with the host.

    Raises:
        ValueError: k is out of range or more than the device can merge, or the dtype is another.
    """
    vocabulary = logits.shape[-1]
    most = min(vocabulary, largest_sort(logits.device) // 4)
    if not 1 <= k <= most:
        raise ValueError(
            f"top-k {k} is outside 1..{most} for a vocabulary of {vocabulary} on {logits.device}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits are {logits.dtype}; give float32, bfloat16 or float16")
    flat = logits.reshape(-1, vocabulary)
    rows = flat.shape[0]
    k_pad = max(2, triton.next_power_of_2(k))
    chunk = max(_CHUNK, 4 * k_pad)
    chunks = triton.cdiv(vocabulary, chunk)
    keys = flat.new_empty((rows, chunks, k_pad), dtype=torch.int64)
    peaks = flat.new_empty((rows, chunks), dtype=torch.float32)
    sums = torch.empty_like(peaks)
    grouped = k_pad * _GROUP <= chunk // 2
    _chunk_kernel[(rows, chunks)](
        flat, keys, peaks, sums, flat.stride(0), vocabulary, chunks,
        K_PAD=k_pad, GROUPS=chunk // _GROUP, GROUP=_GROUP, GROUPED=grouped,
        num_warps=_chunk_warps(chunk),
    )  # fmt: skip
    return _merge(keys, peaks, sums, k, logits.shape[:-1])


def _chunk_warps(chunk: int) -> int:
    """Sixteen logits a thread."""
    return max(1, min(16, chunk // 512))


def _merge(keys: Tensor, peaks: Tensor, sums: Tensor, k: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Merge each row's lists of keys, [rows, lists, k_pad], until one is left."""
    rows, chunks, k_pad = keys.shape
    logprobs = keys.new_empty((*shape, k), dtype=torch.float32)
    tokens = keys.new_empty((*shape, k))
    most = max(2, _MERGED // k_pad)
    while True:
        lists = keys.shape[1]
        fan_in = min(most, triton.next_power_of_2(lists))
        merged = triton.cdiv(lists, fan_in)
        out = keys.new_empty((rows, merged, k_pad)) if merged > 1 else keys
        _merge_kernel[(rows, merged)](
            keys, out, peaks, sums, logprobs, tokens, lists, merged, chunks, k,
            K_PAD=k_pad, FAN_IN=fan_in, CHUNKS_PAD=triton.next_power_of_2(chunks), LAST=merged == 1,
            num_warps=warps_for(fan_in * k_pad),
        )  # fmt: skip
        if merged == 1:
            return logprobs, tokens
        keys = out
