"""DDTREE as SGLang sees an algorithm: what it is like, and what becomes of the server arguments."""

from __future__ import annotations

import json
import logging
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from toolkit.ddtree.models.config import read_drafter_config
from toolkit.ddtree.models.errors import CheckpointError
from toolkit.ddtree.server.debug_log import DebugLog
from toolkit.ddtree.sglang import hooks
from toolkit.ddtree.sglang.capabilities import Model, refusals
from toolkit.ddtree.sglang.options import TreeOptions
from toolkit.ddtree.types import Expansion

log = logging.getLogger(__name__)

_MAX_RUNNING_REQUESTS = 48  # what SGLang sets for its own algorithms
_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"


class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Answers SGLang's questions as DFLASH does, but for the width of a verification.

    SGLang calls `create_future_map`, `need_topk` and `carries_draft_hidden_states`, which its base class
    lacks.
    """

    def is_dflash(self) -> bool:
        """The drafter is DFLASH's: its model, its hidden states of the target, its share of K/V memory."""
        return True

    def is_dflash_family(self) -> bool:
        """See `is_dflash`."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The drafter's block runs as a verification forward."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """The worker runs the scheduler's grammar barrier."""
        return True

    def has_draft_kv(self) -> bool:
        """Drafting writes no K/V: no room is kept for branches."""
        return False

    def need_topk(self) -> bool:
        """Nothing of the draft is kept from step to step."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """See `need_topk`."""
        return False

    def create_future_map(
        self, device: Any, req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True, needs_confidence_relay: bool = False,
    ) -> Any:  # fmt: skip
        """The relay between overlapping steps, SGLang's own."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a request: the drafter runs its block, the target the root and `budget` nodes."""
        if is_draft_worker:
            from sglang.srt.runtime_context import get_server_args

            return int(get_server_args().speculative_dflash_block_size)
        return num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        """Set what follows from DDTREE; `validate` ran before."""
        from sglang.srt.arg_groups.speculative_hook import _resolve_dflash_draft_attention_backend

        options = TreeOptions.from_environment()
        replace(options, check_prefix=options.check_prefix or secrets.token_hex(8)).to_environment()
        server_args.speculative_dflash_block_size = _block_size(server_args)
        server_args.speculative_num_draft_tokens = options.width
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = options.topk_cap
        _resolve_dflash_draft_attention_backend(server_args)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_RUNNING_REQUESTS
            log.warning("--max-running-requests is not set: DDTREE sets it to %d", _MAX_RUNNING_REQUESTS)
        if server_args.enable_mixed_chunk:
            server_args.enable_mixed_chunk = False
            log.warning("--enable-mixed-chunk is switched off: DDTREE verifies decode batches only")


def validate(server_args: Any) -> None:
    """Refuse what DDTREE cannot serve, all at once.

    Raises:
        ValueError: one line for each refusal.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    hooks.check_version()
    hooks.check_flags()
    view = resolved_view(server_args)
    found = _process_refusals(view) + _width_refusals(server_args) + _file_refusals(server_args)
    found += refusals(view, attention_backends_of(view), _model(server_args))
    if found:
        raise ValueError("DDTREE cannot be served as asked:\n  " + "\n  ".join(found))


def create_worker(server_args: Any) -> type:
    """The worker's class, in a scheduler process.

    Raises:
        HookError: SGLang is another version, or a hook is not in place.
    """
    del server_args
    hooks.check_version()
    hooks.check_serving()
    from toolkit.ddtree.sglang.worker import DDTreeWorker

    return DDTreeWorker


def _process_refusals(args: Any) -> list[str]:
    """What is wrong with the device and the environment."""
    found = []
    interpreted = args.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (args.device.startswith("cuda") or interpreted):
        found.append(
            f"--device is {args.device}, DDTREE takes cuda (and cpu where TRITON_INTERPRET=1, for tests)"
        )
    simulated = os.environ.get(_SIMULATED, "").strip()
    if simulated not in ("", "-1", "0"):
        found.append(f"{_SIMULATED} is {simulated}: DDTREE commits what the target accepts, nothing else")
    return found


def _width_refusals(args: Any) -> list[str]:
    """What is wrong with the drafter, the block and the width."""
    if args.speculative_draft_model_path is None:
        return ["--speculative-draft-model-path is not set: DDTREE drafts with a DFlash drafter"]
    options = TreeOptions.from_environment()
    found = []
    block = _block_size(args)
    if block < 2:
        found.append(f"--speculative-dflash-block-size is {block}, DDTREE takes 2 or more")
    if options.width < block:
        found.append(
            f"tree budget {options.budget} is below {block - 1}, the drafted tokens of a block of {block}; "
            "the greedy chain would not fit"
        )
    for name, own in (
        ("speculative_num_draft_tokens", options.width),
        ("speculative_eagle_topk", options.topk_cap),
    ):
        value = getattr(args, name)
        if value not in (None, own):
            flag = "--" + name.replace("_", "-")
            found.append(f"{flag} is {value}, DDTREE sets it to {own} from its own flags: leave it out")
    return found


def _file_refusals(args: Any) -> list[str]:
    """What is wrong with the debug file and with the drafter's transition table."""
    options, found = TreeOptions.from_environment(), []
    if options.debug_file is not None:
        try:
            DebugLog(Path(options.debug_file), options.debug_file_bytes).close()
        except OSError as error:
            found.append(f"--speculative-ddtree-debug-file {options.debug_file}: {error.strerror}")
    if options.expansion is Expansion.TRANSITION and args.speculative_draft_model_path is not None:
        try:
            table = read_drafter_config(Path(args.speculative_draft_model_path)).transition
        except CheckpointError as error:
            found.append(f"--speculative-ddtree-expansion transition: {error}")
        else:
            if table is None:
                found.append(
                    f"expansion transition needs a transition table, and {args.speculative_draft_model_path} "
                    "has none: its config.json lacks transition_config"
                )
    return found


def _block_size(args: Any) -> int:
    """Slots of a draft block: the flag's, else the drafter's own.

    Raises:
        ValueError: neither says it.
    """
    if args.speculative_dflash_block_size is not None:
        return int(args.speculative_dflash_block_size)
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    block = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    if block is None:
        raise ValueError(
            f"{args.speculative_draft_model_path} has no block_size in its config.json; "
            "set --speculative-dflash-block-size"
        )
    return int(block)


def _model(args: Any) -> Model:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = args.get_model_config()
    uses_window = getattr(config.hf_text_config, "use_sliding_window", True)
    return Model(
        architecture=config.attention_arch.name,
        sliding_window=config.sliding_window_size if uses_window else None,
        recurrent=mambaish_config(config) is not None,
    )
