"""Request bodies: what is accepted, with which range, and what is refused by name.

Field names are those of SGLang's `/generate` and of the OpenAI API. Nothing is dropped silently: a field
is applied, or is at a value that asks for nothing (`NEUTRAL_*`), or the answer is 400 naming it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.ddtree.server.errors import ApiError

_MAX_ERRORS_SHOWN = 5

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
RequestId = Annotated[str, Field(min_length=1, max_length=256)]
Salt = Annotated[str, Field(max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TreeOptions(_Strict):
    """`custom_params.ddtree`: tree limits of one request, up to the server's own."""

    budget: Annotated[int, Field(ge=1)] | None = None
    topk_cap: Annotated[int, Field(ge=1)] | None = None
    expansion: Literal["chain", "best_first", "chain_seeded", "transition"] | None = None


class CustomParams(_Strict):
    """SGLang's `custom_params`; only `ddtree` is known."""

    ddtree: TreeOptions | None = None


class SamplingFields(_Strict):
    """Sampling fields that all three generation endpoints share; null takes the default."""

    temperature: Annotated[Finite, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, Finite] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_params: CustomParams | None = None


class GenerateSampling(SamplingFields):
    """`sampling_params` of `/generate`."""

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    sampling_seed: Seed | None = None


class GenerateBody(_Strict):
    """Body of `/generate`: one prompt or a list, as text or as token ids."""

    rid: RequestId | list[RequestId] | None = None
    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    stream: bool | None = None
    extra_key: Salt | list[Salt] | None = None
    cache_salt: Salt | list[Salt] | None = None


class StreamOptions(_Strict):
    """`stream_options` of the OpenAI endpoints."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(SamplingFields):
    """Fields that both OpenAI endpoints share."""

    model: str | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None
    rid: RequestId | None = None
    extra_key: Salt | None = None
    cache_salt: Salt | None = None


class CompletionBody(OpenAIBody):
    """Body of `/v1/completions`; `prompt` is text or token ids, one or a list."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]


class TextPart(_Strict):
    """One part of a chat message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One chat message; parts other than text are refused."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatBody(OpenAIBody):
    """Body of `/v1/chat/completions`; `max_completion_tokens` is the newer name of `max_tokens`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class TokenizeBody(_Strict):
    """Body of `/tokenize`."""

    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool | None = None


_NOTHING: tuple[Any, ...] = (None, False)

# Known fields that this server does not implement, with the values that ask for nothing.
NEUTRAL_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
}
NEUTRAL_GENERATE: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "return_logprob": _NOTHING,
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_text_in_logprobs": _NOTHING,
    "return_hidden_states": _NOTHING,
    "log_metrics": (None, True),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "priority": (None,),
    "background": _NOTHING,
}
_NEUTRAL_OPENAI: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_SAMPLING,
    "logprobs": _NOTHING,
    "response_format": (None, {"type": "text"}),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "return_hidden_states": _NOTHING,
    "priority": (None,),
}
NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL_OPENAI,
    "best_of": (None, 1),
    "echo": _NOTHING,
    "suffix": (None,),
}
NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL_OPENAI,
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "store": _NOTHING,
    "service_tier": (None, "auto", "default"),
    "metadata": (None, {}),
}

Body = TypeVar("Body", bound=BaseModel)


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a request body, refusing what JSON does not define.

    NaN and infinities (RFC 8259, section 6), encodings other than UTF-8 (section 8.1), a key given twice and
    a body that is no object are refused.

    Raises:
        ApiError: 400, saying what is wrong.
    """
    try:
        text = data.decode("utf-8-sig")  # strict; json.loads lets surrogates and UTF-16 pass
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        if not isinstance(value, dict):
            raise ApiError(400, "The body must be a JSON object.")
        if b"\\u" in data:
            _check_text(value)
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    return value


def _check_text(value: Any) -> None:
    """Refuse halves of surrogate pairs, which JSON can write and UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "The body has half of a surrogate pair (\\uD800 to \\uDFFF) in a text.") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def parse_generate(body: dict[str, Any]) -> GenerateBody:
    """Validate the body of `/generate`; raises ApiError (400) naming each field at fault."""
    body = _without_neutral(body, NEUTRAL_GENERATE)
    sampling = body.get("sampling_params")
    if isinstance(sampling, dict):
        body["sampling_params"] = _without_neutral(sampling, NEUTRAL_SAMPLING, "sampling_params.")
    elif isinstance(sampling, list):
        body["sampling_params"] = [
            _without_neutral(item, NEUTRAL_SAMPLING, f"sampling_params.{i}.")
            if isinstance(item, dict)
            else item
            for i, item in enumerate(sampling)
        ]
    return _validate(GenerateBody, body)


def parse_completion(body: dict[str, Any]) -> CompletionBody:
    """Validate the body of `/v1/completions`; raises ApiError (400) naming each field at fault."""
    return _validate(CompletionBody, _without_neutral(body, NEUTRAL_COMPLETION))


def parse_chat(body: dict[str, Any]) -> ChatBody:
    """Validate the body of `/v1/chat/completions`; raises ApiError (400) naming each field at fault."""
    return _validate(ChatBody, _without_neutral(body, NEUTRAL_CHAT))


def parse_tokenize(body: dict[str, Any]) -> TokenizeBody:
    """Validate the body of `/tokenize`; raises ApiError (400) naming each field at fault."""
    return _validate(TokenizeBody, body)


def _without_neutral(
    body: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> dict[str, Any]:
    """Drop known, unimplemented fields that ask for nothing; refuse the others."""
    for key in body.keys() & neutral.keys():
        # 1 == True in Python, so the type is compared too.
        if not any(body[key] == value and type(body[key]) is type(value) for value in neutral[key]):
            raise ApiError(
                400,
                f"`{prefix}{key}` is not supported by this server: leave it out.",
                param=prefix + key,
                code="unsupported_parameter",
            )
    return {key: value for key, value in body.items() if key not in neutral}


def _validate(model: type[Body], body: dict[str, Any]) -> Body:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = [_describe(model, item) for item in error.errors(include_url=False, include_input=False)]
    # Of a union's alternatives, the one that got furthest is the one that was meant.
    paths = {path for path, _ in problems}
    deepest = [item for item in problems if not any(path.startswith(f"{item[0]}.") for path in paths)]
    shown = list(dict.fromkeys(text for _, text in deepest))
    more = f" (and {len(shown) - _MAX_ERRORS_SHOWN} more)" if len(shown) > _MAX_ERRORS_SHOWN else ""
    message = "; ".join(shown[:_MAX_ERRORS_SHOWN]) + more + "."
    raise ApiError(400, message, param=deepest[0][0], code="invalid_value")


# pydantic adds the tried alternative of a union to the path; a client knows only its own keys.
_NOT_A_KEY = ("[", "(", "str", "list", "constrained", "GenerateSampling", "function-")


def _describe(model: type[BaseModel], item: Any) -> tuple[str, str]:
    location = [part for part in item["loc"] if isinstance(part, int) or not str(part).startswith(_NOT_A_KEY)]
    path = ".".join(str(part) for part in location) or "body"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), _known_fields(model), n=1)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        return path, f"`{path}` is not a known field{hint}"
    if item["type"] == "missing":
        return path, f"`{path}` is required"
    message = item["msg"].partition(" or instance of")[0].replace("dictionary", "object")
    message = message[0].lower() + message[1:]
    return path, f"`{path}`: {message}"


def _known_fields(model: type[BaseModel]) -> list[str]:
    nested = GenerateSampling.model_fields if model is GenerateBody else {}
    return [*model.model_fields, *nested, *TreeOptions.model_fields]
