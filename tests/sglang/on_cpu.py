"""`python on_cpu.py FLAGS`: stock SGLang's HTTP server on a CPU, with what it lacks there replaced.

Runs in the environment of scripts/sglang_env.sh. SGLang starts its scheduler by importing this file anew, so
all of it but the last lines holds in both processes. Scheduler, memory pools, attention metadata, plugin and
HTTP are SGLang's own; replaced are packages that are not there, and two kernels by plain twins, because
Triton's interpreter takes minutes for them. `test_parts.py` compares twin and kernel.
"""

import importlib.machinery
import os
import runpy
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"


class _Missing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Absent(metaclass=_Missing):
    """Stands for what an absent package would hold; SGLang only names it."""


def _absent_package(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__version__ = "0.28.0"
    module.__getattr__ = lambda attribute: getattr(_Absent, attribute)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


for package in (
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "vllm",
    "vllm._custom_ops",
):
    _absent_package(package)

import sglang.kernels.ops.attention.extend_attention as extend  # noqa: E402
import torch  # noqa: E402

REAL_KERNEL = extend.extend_attention_fwd

torch.set_num_threads(1)
torch.Tensor.record_stream = lambda tensor, stream: None


def extend_attention(
    q, k, v, out, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, mask, causal, mask_indptr, longest,
    k_scale, v_scale, scale=None, **options,
):  # fmt: skip
    """Plain twin of SGLang's Triton extend attention: the prefix without a mask, the new rows with it.

    q [rows, heads, d], k and v [rows, kv_heads, d], caches [slots, kv_heads, d]; request r has the rows
    qo_indptr[r] .. qo_indptr[r + 1] and the prefix kv_indices[kv_indptr[r] .. kv_indptr[r + 1]]. Its mask
    starts at mask_indptr[r], one row of (prefix + rows) cells after another.
    """
    del longest, k_scale, v_scale, options
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    for request in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        prefix = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        new, old = rows.stop - rows.start, len(prefix)
        # Without a prefix the caches may have other heads: a latent target's, which are expanded here.
        held = (k_cache[prefix], v_cache[prefix]) if old else (k[:0], v[:0])
        keys = torch.cat([held[0], k[rows]]).repeat_interleave(group, dim=1)
        values = torch.cat([held[1], v[rows]]).repeat_interleave(group, dim=1)
        if mask is not None:
            start = int(mask_indptr[request])
            cells = mask[start : start + new * (old + new)].view(new, old + new)[:, old:] != 0
        elif causal:
            cells = torch.ones(new, new, dtype=torch.bool).tril()
        else:
            cells = torch.ones(new, new, dtype=torch.bool)
        seen = torch.cat([torch.ones(new, old, dtype=torch.bool), cells], dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        scores = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores, values)


def use_twins() -> None:
    """Let SGLang's attention and the drafter's candidates run on plain twins."""
    from toolkit.ddtree.sglang import draft
    from toolkit.ddtree.tree import topk_logprobs

    extend.extend_attention_fwd = extend_attention
    draft.topk_logprobs = lambda logits, k: tuple(x.contiguous() for x in topk_logprobs(logits, k))


def use_plain_grammar_masks() -> None:
    """SGLang's grammar masks lie in pinned memory and are applied by a CUDA kernel."""
    import xgrammar
    from sglang.srt.constrained import xgrammar_backend

    def apply(*_grammar, logits, vocab_mask):
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    xgrammar_backend._allocate_token_bitmask = lambda vocabulary, rows: xgrammar.allocate_token_bitmask(
        rows, vocabulary
    )
    for owner in (xgrammar_backend.XGrammarGrammar, xgrammar_backend.XGrammarGrammarBackend):
        owner.apply_vocab_mask = apply


def gather_on_the_cpu() -> None:
    """SGLang's operator that gathers into a tensor is registered for accelerators alone."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor


def leave_moves_out_while(flag: Path) -> None:
    """The negative control: while the file exists, accepted K/V rows stay where they were verified."""
    from toolkit.ddtree.sglang.kernels import RowMover

    move = RowMover.__call__
    RowMover.__call__ = lambda self, *rows: None if flag.exists() else move(self, *rows)


use_twins()
use_plain_grammar_masks()
gather_on_the_cpu()
if "TEST_LEAVE_MOVES_OUT" in os.environ:
    leave_moves_out_while(Path(os.environ["TEST_LEAVE_MOVES_OUT"]))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
