"""From a validated body to the engine's requests: defaults, and limits that need the model."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.protocol import (
    ChatBody,
    CompletionBody,
    CustomParams,
    GenerateBody,
    GenerateSampling,
    OpenAIBody,
    SamplingFields,
)
from toolkit.ddtree.types import Expansion, Request, SamplingParams, TreeLimits

_GREEDY_BELOW = 1e-6  # as in SGLang


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model allows.

    Attributes:
        context_length: longest prompt + output, in tokens.
        vocab_size: token ids are below it.
        tree: the server's tree limits, or None where it does not decode with DDTREE.
        encode: text -> token ids.
    """

    context_length: int
    vocab_size: int
    tree: TreeLimits | None
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    """One request and how its text is to be rendered.

    Attributes:
        request: for the engine.
        skip_special_tokens: leave special tokens out of the text.
        trim_stop: cut the stop string or stop token that ended it from the text.
    """

    request: Request
    skip_special_tokens: bool
    trim_stop: bool


def generate_jobs(body: GenerateBody, model: ModelLimits) -> tuple[list[Job], bool]:
    """Jobs of `/generate`, and whether the body asked for a batch.

    Raises:
        ApiError: 400, naming the field.
    """
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "Give either `text` or `input_ids`.", param="text")
    name = "text" if body.input_ids is None else "input_ids"
    prompts, is_batch = _prompts(body.text if body.input_ids is None else body.input_ids, name, model)
    sampling = _spread(body.sampling_params, len(prompts), "sampling_params")
    extra_keys = _spread(body.extra_key, len(prompts), "extra_key")
    salts = _spread(body.cache_salt, len(prompts), "cache_salt")
    rids = _rids(body.rid, len(prompts), is_batch)
    return [
        _job(
            model,
            rid=rids[i],
            prompt=prompts[i],
            name=name,
            fields=sampling[i] or GenerateSampling(),
            limit=_Limit(getattr(sampling[i], "max_new_tokens", None), 128, "sampling_params.max_new_tokens"),
            min_new_tokens=getattr(sampling[i], "min_new_tokens", None),
            seed=getattr(sampling[i], "sampling_seed", None),
            extra_key=_salt(extra_keys[i], salts[i]),
            prefix="sampling_params.",
        )
        for i in range(len(prompts))
    ], is_batch


def completion_jobs(body: CompletionBody, model: ModelLimits) -> list[Job]:
    """Jobs of `/v1/completions`, one a prompt; raises ApiError (400) naming the field."""
    prompts, is_batch = _prompts(body.prompt, "prompt", model)
    rids = _rids(body.rid or f"cmpl-{uuid.uuid4().hex}", len(prompts), is_batch)
    limit = _Limit(body.max_tokens, 16, "max_tokens")
    return [
        _openai_job(body, model, rid, prompt, "prompt", limit)
        for rid, prompt in zip(rids, prompts, strict=True)
    ]


def chat_job(body: ChatBody, prompt: Sequence[int], model: ModelLimits) -> Job:
    """The job of `/v1/chat/completions` for the rendered `prompt`; raises ApiError (400)."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "Give `max_tokens` or `max_completion_tokens`, not both.", param="max_tokens")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = _Limit(body.max_tokens or body.max_completion_tokens, model.context_length, name)
    rid = body.rid or f"chatcmpl-{uuid.uuid4().hex}"
    return _openai_job(body, model, rid, prompt, "messages", limit)


@dataclass(frozen=True, slots=True)
class _Limit:
    """The asked token limit, what is taken if none was asked, and the field's name."""

    asked: int | None
    default: int
    name: str


def _openai_job(
    body: OpenAIBody, model: ModelLimits, rid: str, prompt: Sequence[int], name: str, limit: _Limit
) -> Job:
    return _job(
        model,
        rid=rid,
        prompt=prompt,
        name=name,
        fields=body,
        limit=limit,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
        extra_key=_salt(body.extra_key, body.cache_salt),
        prefix="",
    )


def _job(
    model: ModelLimits,
    *,
    rid: str,
    prompt: Sequence[int],
    name: str,
    fields: SamplingFields,
    limit: _Limit,
    min_new_tokens: int | None,
    seed: int | None,
    extra_key: str,
    prefix: str,
) -> Job:
    room = _check_prompt(prompt, name, model)
    max_new_tokens = min(limit.default, room) if limit.asked is None else limit.asked
    if max_new_tokens > room:
        raise ApiError(
            400,
            f"`{limit.name}` is {max_new_tokens}, but the prompt's {len(prompt)} tokens leave {room} of the "
            f"context's {model.context_length}.",
            param=limit.name,
            code="context_length_exceeded",
        )
    least = min_new_tokens or 0
    if least > max_new_tokens:
        raise ApiError(
            400, f"At least {least} tokens are asked for, but at most {max_new_tokens}.", param=limit.name
        )
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=least,
        sampling_seed=seed,
        **_sampling_values(fields, model, prefix),
    )
    request = Request(
        rid=rid,
        input_ids=tuple(prompt),
        sampling=sampling,
        limits=_tree_limits(fields.custom_params, model.tree, prefix),
        extra_key=extra_key,
    )
    return Job(request, fields.skip_special_tokens is not False, not fields.no_stop_trim)


def _sampling_values(fields: SamplingFields, model: ModelLimits, prefix: str) -> dict[str, Any]:
    """The engine's sampling fields that have one name everywhere; absent ones keep its defaults."""
    if fields.top_k == 0:
        raise ApiError(400, f"`{prefix}top_k` must be -1 (all tokens) or at least 1.", param=prefix + "top_k")
    names = (
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "ignore_eos",
    )
    values = {name: getattr(fields, name) for name in names if getattr(fields, name) is not None}
    if fields.temperature is not None:
        values["temperature"] = 0.0 if fields.temperature < _GREEDY_BELOW else fields.temperature
    stop = fields.stop or []
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = frozenset(fields.stop_token_ids or ())
    values["logit_bias"] = {
        _token_id(key, model, prefix + "logit_bias"): value
        for key, value in (fields.logit_bias or {}).items()
    }
    for token in values["stop_token_ids"]:
        _token_id(str(token), model, prefix + "stop_token_ids")
    return values


def _token_id(text: str, model: ModelLimits, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < model.vocab_size):
        raise ApiError(
            400, f"`{name}`: {text[:40]!r} is no token id from 0 to {model.vocab_size - 1}.", param=name
        )
    return int(text)


def _check_prompt(prompt: Sequence[int], name: str, model: ModelLimits) -> int:
    """Check a prompt; returns how many tokens may follow it."""
    if not prompt:
        raise ApiError(400, f"`{name}` is empty: at least one token is needed.", param=name)
    for token in prompt:
        if token >= model.vocab_size:
            raise ApiError(400, f"`{name}`: token id {token} is not below {model.vocab_size}.", param=name)
    if len(prompt) >= model.context_length:
        raise ApiError(
            400,
            f"`{name}` has {len(prompt)} tokens; the context holds {model.context_length}, output included.",
            param=name,
            code="context_length_exceeded",
        )
    return model.context_length - len(prompt)


def _tree_limits(custom: CustomParams | None, server: TreeLimits | None, prefix: str) -> TreeLimits | None:
    options = custom.ddtree if custom is not None else None
    if options is None:
        return None
    name = f"{prefix}custom_params.ddtree"
    if server is None:
        raise ApiError(400, f"`{name}`: this server does not decode with DDTREE.", param=name)
    for key, bound in (("budget", server.budget), ("topk_cap", server.topk_cap)):
        asked = getattr(options, key)
        if asked is not None and asked > bound:
            raise ApiError(
                400, f"`{name}.{key}` is {asked}; this server allows up to {bound}.", param=f"{name}.{key}"
            )
    return TreeLimits(
        budget=options.budget or server.budget,
        topk_cap=options.topk_cap or server.topk_cap,
        expansion=Expansion(options.expansion or server.expansion),
    )


def _prompts(value: Any, name: str, model: ModelLimits) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether `value` was a list of prompts."""
    if isinstance(value, str):
        return [model.encode(value)], False
    if not value:
        raise ApiError(400, f"`{name}` is empty.", param=name)
    if isinstance(value[0], int):
        return [value], False
    return [model.encode(item) if isinstance(item, str) else item for item in value], True


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each prompt: a single one serves all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"`{name}` has {len(value)} entries for {count} prompts.", param=name)
    return value


def _rids(value: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(value, str):
        return [f"{value}_{i}" for i in range(count)] if is_batch else [value]
    rids: list[str] = _spread(value, count, "rid")
    return rids


def _salt(extra_key: str | None, cache_salt: str | None) -> str:
    """One cache salt of two fields, such that different pairs never meet."""
    return json.dumps([cache_salt or "", extra_key or ""]) if cache_salt or extra_key else ""
