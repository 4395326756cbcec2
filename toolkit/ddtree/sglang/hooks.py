"""What DDTREE changes in SGLang's running code, and the proof that each change is in place.

A hook that SGLang could not apply is silent: a graph captured without a mask decodes wrong tokens at a good
speed. So each hook answers to a probe, and a server is refused where one does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from toolkit.ddtree.sglang.options import ALGORITHM, OptionError, TreeOptions, add_flags, options_of, selects
from toolkit.ddtree.sglang.version import SUPPORTED, installed_version

_ADD_FLAGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
_READ_FLAGS = "sglang.srt.server_args.ServerArgs.from_cli_args"
_MASK_POLICY = "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy"
_CHECK_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
_ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"

_PROBE = object()
_ANSWER = object()


class HookError(RuntimeError):
    """SGLang is another version, or a hook is not in place; the message is one line."""


def register_flags() -> None:
    """Register the hooks of the command line."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ADD_FLAGS, _add_cli_args, HookType.AFTER)
    HookRegistry.register(_READ_FLAGS, _from_cli_args, HookType.AROUND)


def register_serving() -> None:
    """Register the hooks of a process that serves DDTREE."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_MASK_POLICY, _mask_policy, HookType.AROUND)
    HookRegistry.register(_CHECK_REQUEST, _check_request, HookType.AROUND)
    HookRegistry.register(_ROW_HEADROOM, _row_headroom, HookType.AROUND)
    HookRegistry.register(_INTERNAL_STATE, _internal_state, HookType.AROUND)


def check_version() -> None:
    """Refuse any other SGLang.

    Raises:
        HookError: it is another version.
    """
    found = installed_version()
    if found != SUPPORTED:
        raise HookError(f"DDTREE needs sglang {SUPPORTED}, this is {found or 'not an installed sglang'}")


def check_flags() -> None:
    """Check that the command line's hooks are in place.

    Raises:
        HookError: names the target.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    if _ADD_FLAGS not in HookRegistry._patched:
        raise _missing(_ADD_FLAGS)
    _ask(_READ_FLAGS, ServerArgs.from_cli_args)


def check_serving() -> None:
    """Check that the hooks of serving are in place, also where SGLang's modules hold copies of the functions.

    Raises:
        HookError: names the target.
    """
    _ask(_MASK_POLICY, _resolve(_MASK_POLICY))
    _ask(_CHECK_REQUEST, _resolve(_CHECK_REQUEST), False)
    _ask(_ROW_HEADROOM, _resolve(_ROW_HEADROOM))
    scheduler = import_module("sglang.srt.managers.scheduler")
    _ask(_INTERNAL_STATE, scheduler.Scheduler.get_internal_state, None)
    _ask(_CHECK_REQUEST, scheduler.validate_dflash_request, False)
    pools = import_module("sglang.srt.mem_cache.kv_cache_configurator")
    _ask(_ROW_HEADROOM, pools.get_req_to_token_extra_context_len)


def _resolve(target: str) -> Callable[..., Any]:
    module, name = target.rsplit(".", 1)
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _ask(target: str, function: Callable[..., Any], *rest: Any) -> None:
    try:
        answer = function(_PROBE, *rest)
    except Exception:  # the stock function, which knows no probe
        answer = None
    if answer is not _ANSWER:
        raise _missing(target)


def _missing(target: str) -> HookError:
    return HookError(
        f"the hook on {target} is not in place: see the log for why it failed, or whether another plugin "
        "replaced it"
    )


def _add_cli_args(result: Any, parser: argparse.ArgumentParser) -> Any:
    add_flags(parser)
    return result


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    if args is _PROBE:
        return _ANSWER
    try:
        options = options_of(args)
    except OptionError as error:
        raise SystemExit(f"error: {error}") from None
    if not selects(args.speculative_algorithm):
        return original(cls, args)
    options.to_environment()
    _default_backend(args)
    resolved = original(cls, args)
    from toolkit.ddtree.sglang.http import add_routes

    add_routes()
    return resolved


def _default_backend(args: argparse.Namespace) -> None:
    """SGLang's own default is often a backend without tree masks."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    if not any(getattr(args, name) for name in names):
        args.attention_backend = "triton"


def _mask_policy(original: Callable[..., Any], attn_backend: Any) -> Any:
    """Whether a verification graph is captured with a mask: with DDTREE always, else as SGLang decides."""
    if attn_backend is _PROBE:
        return _ANSWER
    name, needed = original(attn_backend)
    return name, needed or _serves_ddtree()


def _check_request(original: Callable[..., Any], req: Any, enable_overlap: bool) -> Any:
    """What is wrong with a request, or None."""
    if req is _PROBE:
        return _ANSWER
    problem = original(req, enable_overlap)
    if problem is not None or not _serves_ddtree():
        return problem
    from toolkit.ddtree.sglang.requests import problem_of

    return problem_of(req, TreeOptions.from_environment())


def _row_headroom(original: Callable[..., Any], server_args: Any) -> Any:
    """Places beyond the context in each request's row of cache slots.

    SGLang reserves twice the verify width behind the committed tokens, but leaves room for one width: near
    the context limit a wide verification would write into the next request's row.
    """
    if server_args is _PROBE:
        return _ANSWER
    places = original(server_args)
    if not selects(server_args.speculative_algorithm):
        return places
    return max(places, 2 * int(server_args.speculative_num_draft_tokens) + 4)


def _internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """What `/server_info` tells of a scheduler, DDTREE's part with it."""
    if scheduler is _PROBE:
        return _ANSWER
    answer = original(scheduler, request)
    if _serves_ddtree():
        answer.internal_state["ddtree"] = scheduler.draft_worker.state()
    return answer


def _serves_ddtree() -> bool:
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_algorithm == ALGORITHM)
