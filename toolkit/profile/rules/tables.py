"""What the engines can and cannot do, as data (SGLang 0.5.17)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

NO_TREE_MASK: Final[Mapping[str, str]] = {
    "flashinfer": "it is silently causal on MLA models, which loses the siblings of the tree",
    "cutlass_mla": "it is silently causal at verify, which loses the siblings of the tree",
    "flashmla": "it takes no tree mask at verify",
    "trtllm_mla": "it takes no tree mask at verify",
    "trtllm_mha": "it takes no tree mask at verify",
    "torch_native": "it takes no tree mask at verify",
}
"""Attention backends that cannot verify a tree, with the reason; the others can."""

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

TREE_REFUSES: Final[Mapping[str, tuple[str | None, str]]] = {
    "--disaggregation-mode": ("null", "the tree is not carried between prefill and decode servers"),
    "--speculative-accept-threshold-single": ("1.0", "any other value changes the served text"),
    "--speculative-accept-threshold-acc": ("1.0", "any other value changes the served text"),
    "--speculative-draft-window-size": (None, "the drafter reads the whole context"),
    "--speculative-use-rejection-sampling": (None, "it is biased on trees of top-k marginals"),
    "--speculative-eagle-topk": (None, "it belongs to EAGLE trees"),
    "--speculative-num-steps": (None, "the tree's depth follows from speculative.block_size"),
}
"""Arguments that do not go with DDTREE: the one value that does (None: no value does) and the reason."""

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
