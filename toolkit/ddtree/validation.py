"""What an engine refuses: configurations and requests that it could not serve exactly as asked."""

from __future__ import annotations

import math

from toolkit.ddtree.types import Algorithm, EngineConfig, Expansion, Request, SamplingParams, TreeLimits

_GREATEST = 1e6


def check_context(config: EngineConfig, longest: int) -> None:
    """Check the context length, before tables of that length are made.

    Args:
        config: the configuration.
        longest: the target's max_position_embeddings.

    Raises:
        ValueError: it is outside of what the model has.
    """
    context = config.context_length
    if context is not None and not 2 <= context <= longest:
        raise ValueError(
            f"context_length {context} is outside 2..{longest}, the model's max_position_embeddings"
        )


def check_config(config: EngineConfig, block_size: int, has_table: bool) -> None:
    """Check a configuration against the models.

    Args:
        config: the configuration.
        block_size: slots of a draft block; 1 without a drafter.
        has_table: whether the drafter has a transition table.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """
    for key, low in (("max_running_requests", 1), ("prefix_cache_tokens", 0)):
        if getattr(config, key) < low:
            raise ValueError(f"{key} {getattr(config, key)} is below {low}")
    if config.algorithm is not Algorithm.DDTREE:
        return
    if config.limits.budget < block_size - 1:
        raise ValueError(
            f"tree budget {config.limits.budget} is below {block_size - 1}, the drafted tokens of a block of "
            f"{block_size}; the greedy chain would not fit"
        )
    if config.limits.topk_cap < 1:
        raise ValueError(f"topk_cap {config.limits.topk_cap} is below 1")
    _check_expansion(config.limits, config, has_table)


def check_request(
    request: Request, config: EngineConfig, vocabulary: int, context_length: int, has_table: bool
) -> None:
    """Check a request.

    Args:
        request: what is asked.
        config: the engine's.
        vocabulary: tokens of the target.
        context_length: longest prompt + output.
        has_table: whether the drafter has a transition table.

    Raises:
        ValueError: names what is wrong and what is allowed.
    """
    prompt = request.input_ids
    if not prompt:
        raise ValueError("the prompt has no tokens; at least one is needed")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ValueError(f"the prompt holds token ids outside 0..{vocabulary - 1}")
    if len(prompt) >= context_length:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens; with at least one of output it must fit the context "
            f"of {context_length}"
        )
    check_sampling(request.sampling, vocabulary)
    if request.limits is not None:
        _check_limits(request.limits, config, has_table)


def check_sampling(params: SamplingParams, vocabulary: int) -> None:
    """Check that sampling parameters mean something.

    Raises:
        ValueError: names the parameter, its value and what is allowed.
    """
    limits = (
        ("max_new_tokens", params.max_new_tokens, 0, math.inf),
        ("min_new_tokens", params.min_new_tokens, 0, max(0, params.max_new_tokens)),
        ("temperature", params.temperature, 0, _GREATEST),
        ("top_p", params.top_p, 0, 1),
        ("min_p", params.min_p, 0, 1),
        ("repetition_penalty", params.repetition_penalty, 0, _GREATEST),
        ("frequency_penalty", params.frequency_penalty, -_GREATEST, _GREATEST),
        ("presence_penalty", params.presence_penalty, -_GREATEST, _GREATEST),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise ValueError(f"{name} {value} is outside {low}..{high}")
    for name in ("top_p", "repetition_penalty"):
        if getattr(params, name) == 0:
            raise ValueError(f"{name} 0 leaves no token; it must be above 0")
    if params.top_k < -1 or params.top_k == 0:
        raise ValueError(f"top_k {params.top_k} is neither -1, for all tokens, nor at least 1")
    for token in (*params.logit_bias, *params.stop_token_ids):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"token id {token} of logit_bias or stop_token_ids is outside 0..{vocabulary - 1}"
            )
    if not all(math.isfinite(bias) for bias in params.logit_bias.values()):
        raise ValueError("logit_bias holds a value that is not a finite number")
    if not all(params.stop):
        raise ValueError("stop holds an empty string")


def _check_limits(limits: TreeLimits, config: EngineConfig, has_table: bool) -> None:
    if config.algorithm is not Algorithm.DDTREE:
        raise ValueError(f"tree limits need algorithm DDTREE; this engine decodes with {config.algorithm}")
    for key in ("budget", "topk_cap"):
        asked, ours = getattr(limits, key), getattr(config.limits, key)
        if not 1 <= asked <= ours:
            raise ValueError(f"{key} {asked} is outside 1..{ours}, the server's own limit")
    _check_expansion(limits, config, has_table)


def _check_expansion(limits: TreeLimits, config: EngineConfig, has_table: bool) -> None:
    if limits.expansion is Expansion.TRANSITION and not has_table:
        others = ", ".join(other for other in Expansion if other is not Expansion.TRANSITION)
        raise ValueError(
            f"expansion transition needs a transition table, and the drafter {config.draft_model_path} has "
            f"none: its config.json lacks transition_config; use one of {others}"
        )
