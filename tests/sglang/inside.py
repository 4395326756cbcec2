"""`python inside.py < CASES`: what SGLang makes of command lines, with the plugin; runs in its environment.

Reads JSON lists of flags; prints, for each, the resolved values or the refusal, and then facts of the hooks.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
import on_cpu  # first: it stands for packages that the next ones import
import torch
from sglang.kernels.ops.attention import extend_attention as kernel_module
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
from sglang.srt.speculative import dflash_utils

from toolkit.ddtree.sglang import hooks
from toolkit.ddtree.sglang.options import ENVIRONMENT

RESOLVED = (
    "attention_backend",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_eagle_topk",
    "speculative_num_steps",
    "max_running_requests",
)


class TritonAttnBackend:
    """Has the name that SGLang's mask policy goes by."""


def resolve(argv):
    os.environ.pop(ENVIRONMENT, None)
    try:
        args = prepare_server_args(argv)
    except (SystemExit, ValueError, AssertionError, hooks.HookError) as error:
        return {"refused": str(error)}
    values = {name: getattr(args, name) for name in RESOLVED}
    return {"resolved": values, "environment": os.environ.get(ENVIRONMENT), "route": has_route()}


def has_route():
    """Whether SGLang's HTTP application offers the self-check."""
    module = sys.modules.get("sglang.srt.entrypoints.http_server")
    return module is not None and any(
        getattr(route, "path", "") == "/ddtree/self_check" for route in module.app.routes
    )


def resolve_with(variables, argv):
    os.environ.update(variables)
    try:
        return resolve(argv)
    finally:
        for name in variables:
            del os.environ[name]


def failure(check):
    try:
        check()
    except hooks.HookError as error:
        return str(error)
    return None


def hook_facts():
    """What the hooks do, and what the checks say when one is missing."""
    facts = {"idle": hasattr(dflash_utils.resolve_dflash_verify_mask_policy, "__wrapped__")}
    facts["unhooked"] = failure(hooks.check_serving)
    hooks.register_serving()
    HookRegistry.apply_hooks()
    facts["hooked"] = failure(hooks.check_serving)
    policy = dflash_utils.resolve_dflash_verify_mask_policy
    for name in ("selected", "not_selected"):
        hooks._serves_ddtree = lambda name=name: name == "selected"
        facts[name] = policy(TritonAttnBackend())
    dflash_utils.resolve_dflash_verify_mask_policy = policy.__wrapped__
    facts["lost"] = failure(hooks.check_serving)
    dflash_utils.resolve_dflash_verify_mask_policy = policy
    import sglang.srt.managers.scheduler as scheduler

    scheduler.validate_dflash_request = dflash_utils.validate_dflash_request.__wrapped__
    facts["copy_lost"] = failure(hooks.check_serving)
    scheduler.validate_dflash_request = dflash_utils.validate_dflash_request
    scheduler.Scheduler.get_internal_state = scheduler.Scheduler.get_internal_state.__wrapped__
    facts["state_lost"] = failure(hooks.check_serving)
    for name in ("DDTREE", "DFLASH"):
        args = SimpleNamespace(
            speculative_algorithm=name,
            speculative_num_draft_tokens=33,
            max_speculative_num_draft_tokens=33,
            page_size=1,
        )
        facts[f"headroom {name}"] = allocation_sizing.get_req_to_token_extra_context_len(args)
    hooks.installed_version = lambda: "0.5.18"
    facts["version"] = failure(hooks.check_version)
    return facts


def captured(width, mask):
    """What the worker says to a graph of this width, captured with this mask."""
    from toolkit.ddtree.sglang.options import TreeOptions
    from toolkit.ddtree.sglang.worker import DDTreeWorker

    graphs = SimpleNamespace(
        captured_req_width=width,
        capture_bs=[1, 8],
        get_spec_info=lambda tokens: SimpleNamespace(custom_mask=mask),
    )
    runner = SimpleNamespace(
        decode_cuda_graph_runner=graphs, attn_backend=SimpleNamespace(verify_mask=object())
    )
    worker = SimpleNamespace(
        model_runner=runner,
        _options=TreeOptions(16, 8),
        server_args=SimpleNamespace(max_running_requests=8),
        ps=SimpleNamespace(tp_rank=0),
    )
    try:
        DDTreeWorker._check_captured(worker)
    except RuntimeError as error:
        return str(error)
    return None


def twin_error():
    """The greatest difference between SGLang's extend attention and the twin that stands in for it."""
    torch.manual_seed(0)
    rows, lengths, heads = 6, [5, 9], (4, 2)
    worst = 0.0
    for masked, causal in ((False, True), (False, False), (True, True)):
        q = torch.randn(2 * rows, heads[0], 64)
        k, v = torch.randn(2, 2 * rows, heads[1], 64).unbind()
        caches = torch.randn(2, 32, heads[1], 64).unbind()
        sizes = torch.tensor([rows * (length + rows) for length in lengths])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        mask = (torch.rand(int(sizes.sum())) > 0.5).to(torch.uint8)
        for request, length in enumerate(lengths):
            cells = mask[starts[request] : starts[request + 1]].view(rows, -1)
            cells[:, length:].fill_diagonal_(1)
        outputs = []
        for function in (REAL_KERNEL, on_cpu.extend_attention):
            out = torch.full_like(q, float("nan"))
            function(
                q, k, v, out, *caches, torch.tensor([0, rows, 2 * rows], dtype=torch.int32),
                torch.tensor([0, 5, 14], dtype=torch.int32), torch.randperm(32, generator=seed())[:14],
                mask if masked else None, causal, starts, rows, 1.0, 1.0, 0.125,
            )  # fmt: skip
            outputs.append(out)
        worst = max(worst, float((outputs[0] - outputs[1]).abs().max()))
    return worst


def seed():
    return torch.Generator().manual_seed(3)


REAL_KERNEL = on_cpu.REAL_KERNEL
assert kernel_module.extend_attention_fwd is on_cpu.extend_attention

if __name__ == "__main__":
    load_plugins()
    told_argv = json.load(sys.stdin)
    told = {"before": resolve([*told_argv[0][: told_argv[0].index("--speculative-draft-model-path")]])}
    told |= {"cases": [resolve(argv) for argv in told_argv]}
    told["simulated"] = resolve_with({"SGLANG_SIMULATE_ACC_LEN": "3"}, told_argv[0])
    told["captured"] = [captured(17, "mask"), captured(8, "mask"), captured(17, None)]
    print(json.dumps(told | {"hooks": hook_facts(), "twin_error": twin_error()}))
