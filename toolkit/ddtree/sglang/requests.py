"""What a request may ask of DDTREE. What cannot be done exactly is answered 400, never dropped."""

from __future__ import annotations

from typing import Any

from toolkit.ddtree.sglang.options import OptionError, TreeOptions
from toolkit.ddtree.types import TreeLimits


def problem_of(req: Any, options: TreeOptions) -> str | None:
    """Why a request cannot be served, in one line, or None.

    Args:
        req: SGLang's request.
        options: the server's.
    """
    params = req.sampling_params
    if params.min_new_tokens and req.tokenizer is None:
        return "min_new_tokens needs a server with a tokenizer, which says what ends a text."
    if req.return_hidden_states:
        return "DDTREE does not support return_hidden_states."
    if req.custom_logit_processor:
        return "DDTREE does not support custom_logit_processor."
    try:
        options.request_limits(params.custom_params)
    except OptionError as error:
        return f"{error}."
    return None


def limits_of(reqs: list[Any], options: TreeOptions) -> tuple[TreeLimits, ...]:
    """Tree limits of the requests of a batch, in its order; they were checked when they came."""
    own = options.limits
    return tuple(
        own
        if req.sampling_params.custom_params is None
        else options.request_limits(req.sampling_params.custom_params)
        for req in reqs
    )
