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


def without_memory():
    """Whether a worker that has no memory for the recording of a step's end goes on without it."""
    from toolkit.ddtree.sglang.options import TreeOptions
    from toolkit.ddtree.sglang.worker import DDTreeWorker

    def drafter():
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = SimpleNamespace(
        capture_bs=[1, 2],
        backend=SimpleNamespace(_outputs={1: SimpleNamespace(hidden_states=torch.zeros(34, 8))}),
        _capture_graph_size=lambda bs, num_tokens: bs,
        _make_graph_key=lambda size: 1,
    )
    runner = SimpleNamespace(decode_cuda_graph_runner=graphs)
    worker = DDTreeWorker.__new__(DDTreeWorker)
    vars(worker).update(
        _target_worker=SimpleNamespace(model_runner=runner), model_runner=runner, draft_model_runner=runner,
        _options=TreeOptions(16, 8), block_size=8, device="cpu", _tails=None, _drafter=drafter,
    )  # fmt: skip
    worker._record_tails()
    return worker._tails is None


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


def backend(lengths, rows, heads, size):
    """SGLang's Triton backend as far as a verification of a batch asks it."""
    from sglang.srt.layers.attention.triton_backend import ForwardMetadata
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend as Backend

    own, requests = Backend.__new__(Backend), len(lengths)
    own.qo_indptr, own.mask_indptr = torch.full((2, requests + 3), -7).unbind()
    own.kv_indptr = torch.full((requests + 3,), -7, dtype=torch.int32)
    for starts in (own.qo_indptr, own.mask_indptr, own.kv_indptr):
        starts[0] = 0  # as SGLang makes them
    own.cuda_graph_kv_indices = torch.full((sum(lengths) + 5,), -7)
    own.window_kv_indptr = own.sliding_window_size = own._translate_kv_loc = None
    own.num_draft_tokens, own.device, own.dcp_size, own.page_size = rows, "cpu", 1, 1
    own._verify_mask = SimpleNamespace(buffer=torch.zeros(99, dtype=torch.uint8))
    own.req_to_token = torch.randperm(6 * 40, generator=seed()).to(torch.int32).view(6, 40)
    own.use_verify_splitkv = own.enable_deterministic = own.use_mla = False
    own.extend_attention_fwd, own.verify_splitkv_fwd = on_cpu.extend_attention, None
    caches = torch.randn(2, 240, heads, size, generator=seed()).unbind()
    own.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda _: caches[0], get_value_buffer=lambda _: caches[1]
    )
    own.req_to_token_pool = SimpleNamespace(size=6)
    own.forward_metadata = SimpleNamespace(**dict.fromkeys(ForwardMetadata.__annotations__))
    return own


def planned():
    """What a backend plans for a verification, stock and with DDTREE's launch, as lists."""
    from toolkit.ddtree.sglang import plan

    told = []
    lengths, places = torch.tensor([5, 0, 31]), torch.tensor([4, 1, 2])
    for mask in (torch.empty(0, dtype=torch.uint8), None):
        pair = []
        for installed in (False, True):
            own = backend([5, 0, 31], 9, 2, 16)
            if installed:
                assert plan.install(own)
            spec = SimpleNamespace(draft_token_num=9, custom_mask=mask)
            answer = own._update_target_verify_buffers(3, lengths, places, spec)
            held = (own.qo_indptr, own.kv_indptr, own.mask_indptr, own.cuda_graph_kv_indices)
            pair.append([part if part is None else part.tolist() for part in (*answer, *held)])
            if mask is not None:
                assert answer[2] is own._verify_mask.buffer
        told.append(pair)
    return told


def attended():
    """The greatest difference of a backend's verification with DDTREE's kernel and the stock one's twin."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from toolkit.ddtree.sglang import attention

    heads, kv_heads, size, rows, lengths = 4, 2, 32, 9, [5, 0, 31]
    layer = SimpleNamespace(
        qk_head_dim=size, v_head_dim=size, tp_q_head_num=heads, layer_id=0, k_scale=None, v_scale=None,
        logit_cap=0.0, logit_capping_method="tanh", is_cross_attention=False, attn_type=None,
        sliding_window_size=-1, scaling=0.2, xai_temperature_len=-1,
    )  # fmt: skip
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    query, key, value = (
        torch.randn(3 * rows, n * size, generator=seed()) for n in (heads, kv_heads, kv_heads)
    )
    key, value = key.view(-1, kv_heads, size), value.view(-1, kv_heads, size) * 2
    told = {}
    for masked in (True, False):
        outs = []
        for installed in (False, True):
            own = backend(lengths, rows, kv_heads, size)
            if installed:
                assert attention.install(own)
                own.extend_attention_fwd = None  # not to be asked
            cells = torch.rand(rows * (sum(lengths) + 3 * rows), generator=seed()) < 0.5
            vars(own.forward_metadata).update(
                qo_indptr=torch.arange(4) * rows,
                kv_indptr=torch.tensor([0, *lengths]).cumsum(0).int(),
                kv_indices=torch.randperm(240, generator=seed())[: sum(lengths)],
                custom_mask=cells.to(torch.uint8) if masked else None,
                mask_indptr=torch.tensor([0, *(rows * (n + rows) for n in lengths)]).cumsum(0),
                max_extend_len=rows,
            )
            outs.append(own.forward_extend(query, key, value, layer, batch, save_kv_cache=False))
        rows_seen = ~outs[0].isnan()  # a random mask leaves rows that see nothing
        told[str(masked)] = float((outs[0] - outs[1])[rows_seen].abs().max())
        told[f"{masked} rows"] = float(rows_seen.float().mean())
    own_rows, said = query.view(-1, heads, size), []
    attention.log.addFilter(lambda record: said.append(record.getMessage()))
    strange = key.to(torch.float8_e5m2)
    for name, part, cap in (
        ("a cap", key, 30.0),
        ("rows out of the cache", strange, 0.0),
        ("it again", key, 30.0),
    ):
        taken = attention.verify(
            own_rows, part, value, own_rows.clone(), *[own.token_to_kv_pool.get_key_buffer(0)] * 2, None,
            torch.tensor([0, 5, 5, 36]), torch.arange(36), None, True, None, rows, 1.0, 1.0, 0.2,
            logit_cap=cap, max_bs=6,
        )  # fmt: skip
        told[f"refuses {name}"] = not taken
    return told | {"said": said}


REAL_KERNEL = on_cpu.REAL_KERNEL
assert kernel_module.extend_attention_fwd is on_cpu.extend_attention

if __name__ == "__main__":
    load_plugins()
    told_argv = json.load(sys.stdin)
    told = {"before": resolve([*told_argv[0][: told_argv[0].index("--speculative-draft-model-path")]])}
    told |= {"cases": [resolve(argv) for argv in told_argv]}
    told["simulated"] = resolve_with({"SGLANG_SIMULATE_ACC_LEN": "3"}, told_argv[0])
    told["without memory"] = without_memory()
    told["captured"] = [captured(17, "mask"), captured(8, "mask"), captured(17, None)]
    told |= {"hooks": hook_facts(), "twin_error": twin_error()}
    print(json.dumps(told | {"planned": planned(), "attended": attended()}))
