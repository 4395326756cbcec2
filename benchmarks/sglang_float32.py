"""A plugin of SGLang for targets in float32 on a GPU, whose fused norms know half precision only."""

from __future__ import annotations

from typing import Any


def register() -> None:
    from sglang.srt.layers.layernorm import RMSNorm

    RMSNorm.forward_cuda = plain


def plain(norm: Any, *inputs: Any, **more: Any) -> Any:
    """SGLang's own norm in PyTorch's operations."""
    return norm.forward_native(*inputs, **more)
