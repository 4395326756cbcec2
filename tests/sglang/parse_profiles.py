"""`python parse_profiles.py < CASES`: what SGLang's parser makes of rendered arguments; in its environment.

Reads a JSON list of `{"argv": [...], "capability": "12.0", "memory_mib": 97887}`; prints for each what SGLang
resolved, or why it refused. There is no GPU here: SGLang's questions for one are answered with the case's
figures. Not asked, and so not checked, is what only running kernels tell.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import on_cpu  # first: it stands for packages that the next ones import
import torch
from sglang.srt import server_args
from sglang.srt.arg_groups import overrides
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.layers.attention.triton_backend import _mla_decode_kv_splits_cap
from sglang.srt.layers.attention.verify_mask import tree_mask_numel
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.dflash_utils import scale_kv_cell_size_per_token_for_dflash
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from toolkit.ddtree.sglang.options import ENVIRONMENT

RESOLVED = (
    "attention_backend",
    "page_size",
    "kv_cache_dtype",
    "mem_fraction_static",
    "chunked_prefill_size",
    "tp_size",
    "pp_size",
    "ep_size",
    "max_running_requests",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_draft_attention_backend",
    "moe_runner_backend",
    "api_key",
    "admin_api_key",
    "context_length",
)
MAJORS = {
    "is_sm90_supported": (9,),
    "is_hopper_with_cuda_12_3": (9,),
    "is_sm100_supported": (10,),
    "is_sm120_supported": (12,),
    "is_blackwell_supported": (10, 11, 12),
}


def answer_as(capability: str, memory_mib: int) -> None:
    """Let SGLang's argument resolution see such a GPU."""
    major, minor = map(int, capability.split("."))
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    for module in (server_args, overrides):
        for name, majors in MAJORS.items():
            if hasattr(module, name):
                setattr(module, name, lambda majors=majors: major in majors)
        if hasattr(module, "get_device_capability"):
            module.get_device_capability = lambda *_: (major, minor)
        if hasattr(module, "is_cuda"):
            module.is_cuda = lambda: True
    server_args.get_device_memory_capacity = lambda *_: float(memory_mib)


def parse(case: dict) -> dict:
    os.environ.pop(ENVIRONMENT, None)
    answer_as(case["capability"], case["memory_mib"])
    try:
        args = server_args.prepare_server_args(case["argv"])
    except (Exception, SystemExit) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    decode = args.cuda_graph_config.decode
    return {
        "resolved": {name: getattr(args, name) for name in RESOLVED}
        | {"graph": [decode.max_bs, max(decode.bs)]},
        "tree": os.environ.get(ENVIRONMENT),
    }


def sizes() -> dict:
    """SGLang's own figures for terms of the memory's sum."""
    return {
        "mask": tree_mask_numel(TreeMaskMode.FULL_MASK, 48, 33, 262144),
        "splits": [_mla_decode_kv_splits_cap(8, *pair) for pair in ((188, 131072), (148, 1024))],
        "cell": scale_kv_cell_size_per_token_for_dflash(
            target_cell_size_per_token=61 * 1152, target_num_layers=61, draft_num_layers=6
        ),
        "stages": [[end - start for start, end in (get_pp_indices(61, rank, pp) for rank in range(pp))]
                   for pp in (1, 2, 3, 4, 8)],
    }  # fmt: skip


def choices() -> dict:
    """The values that SGLang's flags take."""
    dtypes = next(
        action.choices for action in parser()._actions if "--kv-cache-dtype" in action.option_strings
    )
    return {
        "attention_backend": server_args.ATTENTION_BACKEND_CHOICES,
        "moe_backend": server_args.MOE_RUNNER_BACKEND_CHOICES,
        "quantization": server_args.QUANTIZATION_CHOICES,
        "kv_cache_dtype": dtypes,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(made)
    return made


if __name__ == "__main__":
    assert on_cpu.REAL_KERNEL
    load_plugins()
    told_cases = json.load(sys.stdin)
    print(json.dumps({"cases": list(map(parse, told_cases)), "sizes": sizes(), "choices": choices()}))
