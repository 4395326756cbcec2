"""What the engines can and cannot do, as data (SGLang 0.5.17)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from toolkit.resources import bundled_data

# The plugin's own data: what it would refuse at start is refused here. Read as a file, since neither side
# imports the other.
_CAPABILITIES = bundled_data("ddtree/sglang/capabilities.toml")

TREE_BACKENDS: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(entry["architectures"]) for name, entry in _CAPABILITIES["backend"].items()
}
"""Attention backends, and the attention architectures whose trees each verifies."""

BACKEND_REASONS: Final[Mapping[str, str]] = {
    name: entry["reason"] for name, entry in _CAPABILITIES["backend"].items() if "reason" in entry
}
"""Why an attention backend does not verify trees."""

OWNED_FLAGS: Final[Mapping[str, str]] = {
    "--model-path": "model.target.source",
    "--model": "model.target.source",
    "--revision": "model.target.revision",
    "--served-model-name": "model.served_name",
    "--context-length": "model.context_length",
    "--trust-remote-code": "model.trust_remote_code",
    "--device": "hardware.device",
    "--dtype": "engine.dtype",
    "--cpu-threads": "engine.threads",
    "--attention-backend": "engine.attention_backend",
    "--quantization": "engine.quantization",
    "--kv-cache-dtype": "engine.kv_cache_dtype",
    "--moe-runner-backend": "engine.moe_backend",
    "--mem-fraction-static": "engine.memory_fraction",
    "--chunked-prefill-size": "engine.prefill_chunk",
    "--page-size": "engine.page_size",
    "--cuda-graph-max-bs": "engine.max_graph_batch",
    "--cuda-graph-max-bs-decode": "engine.max_graph_batch",
    "--tp": "parallelism.tp",
    "--tp-size": "parallelism.tp",
    "--tensor-parallel-size": "parallelism.tp",
    "--pp-size": "parallelism.pp",
    "--pipeline-parallel-size": "parallelism.pp",
    "--ep": "parallelism.ep",
    "--ep-size": "parallelism.ep",
    "--expert-parallel-size": "parallelism.ep",
    "--enable-dp-attention": "parallelism.dp_attention",
    "--speculative-algorithm": "speculative.algorithm",
    "--speculative-draft-model-path": "model.drafter.source",
    "--speculative-draft-model-revision": "model.drafter.revision",
    "--speculative-dflash-block-size": "speculative.block_size",
    "--speculative-ddtree-budget": "speculative.budget",
    "--speculative-ddtree-topk-cap": "speculative.topk_cap",
    "--speculative-ddtree-expansion": "speculative.expansion",
    "--speculative-ddtree-debug-metrics": "speculative.debug_metrics",
    "--host": "service.bind",
    "--port": "service.port",
    "--max-running-requests": "service.max_running_requests",
    "--max-queued-requests": "service.max_queued_requests",
    "--api-key": "service.api_key",
    "--admin-api-key": "service.admin_api_key",
    "--allow-unauthenticated": "service.allow_unauthenticated",
    "--shutdown-timeout": "service.stop_timeout",
    "--config": "service.api_key",
}
"""Arguments that the toolkit writes itself, and the key that each comes from."""

TREE_ARGUMENTS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "--" + name.replace("_", "-"): (
        tuple(str(value) for value in entry["allowed"] if value not in ("unset", False)),
        entry["reason"],
    )
    for name, entry in _CAPABILITIES["argument"].items()
} | {"--speculative-eagle-topk": ((), "it belongs to EAGLE trees")}
"""Arguments that do not go with DDTREE: the values that do (none: leave it out) and the reason."""

BACKEND_GPUS: Final[Mapping[str, tuple[str, str]]] = {
    "fa3": ("9", "Hopper"),
    "trtllm_mla": ("10", "data-centre Blackwell"),  # SGLang lets it start on 12.x, where it fails (#24633)
    "trtllm_mha": ("10", "data-centre Blackwell"),
    "cutlass_mla": ("10", "data-centre Blackwell"),
}
"""Attention backends of one generation: the major compute capability, and its name."""

BACKEND_ATTENTION: Final[Mapping[str, str]] = {
    "flashmla": "MLA",
    "cutlass_mla": "MLA",
    "trtllm_mla": "MLA",
    "trtllm_mha": "MHA",
}
"""Attention backends for models of one architecture."""

EXPERT_KERNELS: Final[Mapping[str, frozenset[str]]] = {
    "flashinfer_cutlass": frozenset({"modelopt_fp4", "modelopt_fp8", ""}),
    "flashinfer_cutedsl": frozenset({"modelopt_fp4"}),
    "flashinfer_trtllm": frozenset(
        {"modelopt_fp4", "modelopt_fp8", "fp8", "mxfp8", "compressed-tensors", ""}
    ),
    "flashinfer_trtllm_routed": frozenset({"modelopt_fp4", "fp8", "mxfp8", ""}),
}
"""Kernels of experts that take some quantizations only (empty: bf16)."""

EXPERTS_WHOLE: Final = frozenset({"flashinfer_cutlass", "flashinfer_cutedsl"})
"""Kernels of experts with ep = 1 or ep = tp, nothing between."""

EXPERTS_WHOLE_FP8: Final = frozenset({"cutlass"})
"""Kernels of experts with ep = 1 where the experts are fp8."""

DOUBTFUL_ENVIRONMENT: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    "NCCL_P2P_DISABLE": (
        re.compile(r"(?i)1|y|yes|t|true"),
        "it switches peer-to-peer transfers off; a hang on PCIe hosts comes from ACS or the IOMMU",
    ),
    "PYTORCH_CUDA_ALLOC_CONF": (
        re.compile(r".*expandable_segments:True.*"),
        "expandable segments break SGLang's custom all-reduce",
    ),
}
"""Environment variables that are known to hurt: the values that do, and why."""

SECRET_NAME: Final = re.compile(
    r"(?i).*(secret|passw(or)?d|credential|api_?key|access_?key|(^|_)token$|private_?key).*"
)
"""Names of environment variables that usually hold a secret."""
