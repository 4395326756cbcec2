"""DDTREE's own attention of verifications and drafts in SGLang's Triton backend.

The stock kernel walks a request's whole prefix in one program for each query head. SGLang asks a backend's
`verify_splitkv_fwd` first, where `use_verify_splitkv` is set: both are attributes of the backend, so they are
set on the backends of a DDTREE worker and on nothing else. What the kernel does not do, it leaves to the
stock one by answering False, and says so once.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolkit.ddtree.kernels.tree_attention import Mask, Prefix, Sees, fits, tree_attention

log = logging.getLogger(__name__)

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BACKEND = "TritonAttnBackend"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_cap": (None, 0), "sliding_window_size": (None, -1), "xai_temperature_len": (None, -1),
    "sinks": (None,), "window_kv_offsets": (None,),
}  # fmt: skip


def install(attn_backend: Any) -> bool:
    """Let a backend verify with DDTREE's kernel; says whether it is one that can."""
    if type(attn_backend).__name__ != _BACKEND or not hasattr(attn_backend, "verify_splitkv_fwd"):
        return False
    attn_backend.verify_splitkv_fwd = torch.compiler.disable(verify)  # type: ignore[no-untyped-call]
    attn_backend.use_verify_splitkv = True
    return True


def verify(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, cached_keys: Tensor, cached_values: Tensor,
    _qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Tensor | None, is_causal: bool,
    mask_indptr: Tensor, max_len_extend: int, k_scale: float, v_scale: float, scale: float, **others: Any,
) -> bool:  # fmt: skip
    """Attention of one layer, with the signature of SGLang's `verify_splitkv_fwd`.

    Args:
        query: [R * W, heads, Dk].
        key: [R * W, K/V heads, Dk], the rows' own.
        value: [R * W, K/V heads, Dv], likewise.
        out: [R * W, heads, Dv], written.
        cached_keys: [cache rows, K/V heads, Dk].
        cached_values: [cache rows, K/V heads, Dv].
        _qo_indptr: int [R + 1], multiples of W.
        kv_indptr: int [R + 1], where each request's part of `kv_indices` begins.
        kv_indices: int, cache rows of the prefixes.
        custom_mask: SGLang's FULL_MASK, or None.
        is_causal: without a mask, whether rows see only those before them.
        mask_indptr: int, where each request's part of the mask begins.
        max_len_extend: W.
        k_scale: of cached keys.
        v_scale: of cached values.
        scale: of the scores.
        **others: logit caps, windows, sinks and temperatures, which the kernel leaves to SGLang's.

    Returns:
        Whether `out` was written.
    """
    asked = [name for name, neutral in _NEUTRAL.items() if others.get(name) not in neutral]
    if asked:
        _leave(f"its own knows no {', '.join(asked)}")
        return False
    if query.shape[0] != (kv_indptr.shape[0] - 1) * max_len_extend:
        _leave("requests have different numbers of rows")
        return False
    reason = _unfit(query, (key, value, out), (cached_keys, cached_values))
    if reason:
        _leave(reason)
        return False
    sees = Sees.EARLIER if is_causal else Sees.ALL
    mask = None
    if custom_mask is not None:
        sees, mask = Sees.MASKED, Mask(custom_mask, mask_indptr)
    prefix = Prefix(cached_keys, cached_values, kv_indptr, kv_indices, k_scale, v_scale)
    tree_attention(query, key, value, out, prefix, scale, sees, mask)
    return True


def _unfit(query: Tensor, rows: tuple[Tensor, ...], cached: tuple[Tensor, ...]) -> str | None:
    """Why the kernel cannot read these, if it cannot."""
    if any(part.dtype != query.dtype for part in rows) or any(
        part.dtype not in (query.dtype, *_FLOAT8) for part in cached
    ):
        dtypes = ", ".join(str(part.dtype).removeprefix("torch.") for part in (query, *rows, *cached))
        return f"query, key, value, result, cached keys and values are {dtypes}"
    if any(part.dim() != 3 or part.stride(-1) != 1 for part in (query, *rows, *cached)):
        return "they are not all [rows, heads, size], the last contiguous"
    if not fits(query, rows[0].shape[2], rows[1].shape[2]):
        return f"keys of {rows[0].shape[2]} and values of {rows[1].shape[2]} do not fit the GPU"
    return None


@cache
def _leave(reason: str) -> None:
    """Say, once in a process, that a layer is left to the backend's kernel."""
    log.warning("DDTREE leaves attention of verifications to the backend's kernel: %s", reason)
