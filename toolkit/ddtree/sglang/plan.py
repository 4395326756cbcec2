"""One launch a step, instead of a dozen, to tell attention where it finds its rows.

SGLang's Triton backend fills the buffers that a captured graph reads with small torch operations, each of
which costs the host more than the device. The method that does so is replaced on the backends of a DDTREE
worker, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from toolkit.ddtree.kernels.verify_plan import plan_verification

_BACKEND = "TritonAttnBackend"
_METHOD = "_update_target_verify_buffers"


def install(attn_backend: Any) -> bool:
    """Let a backend plan verifications with one launch; says whether it is one that can."""
    if type(attn_backend).__name__ != _BACKEND or not hasattr(attn_backend, _METHOD):
        return False
    windowed = (attn_backend.sliding_window_size or 0) > 0
    if windowed or attn_backend._translate_kv_loc is not None or attn_backend.dcp_size > 1:
        return False
    setattr(attn_backend, _METHOD, _planner(attn_backend, getattr(attn_backend, _METHOD)))
    return True


def _planner(backend: Any, stock: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def plan(bs: int, seq_lens: Tensor, req_pool_indices: Tensor, spec_info: Any) -> tuple[Any, ...]:
        mask = getattr(spec_info, "custom_mask", None)
        if mask is not None and len(mask):  # to be copied to where the graph reads it
            return stock(bs, seq_lens, req_pool_indices, spec_info)
        width = getattr(spec_info, "draft_token_num", None) or backend.num_draft_tokens
        starts = backend.qo_indptr[: bs + 1], backend.kv_indptr[: bs + 1], backend.mask_indptr[: bs + 1]
        plan_verification(
            seq_lens[:bs], req_pool_indices, backend.req_to_token, int(width), *starts,
            backend.cuda_graph_kv_indices,
        )  # fmt: skip
        buffer = backend.verify_mask.buffer if mask is not None else None
        return starts[0], starts[1], buffer, starts[2], backend.window_kv_indptr, None, None, None

    return plan
