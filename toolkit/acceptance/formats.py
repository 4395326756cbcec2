"""The two request formats: SGLang's `/generate`, and OpenAI's `/v1/completions` with vLLM's additions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.acceptance.exchange import Ask, EndpointError, Generation, Identity


class NativePieces:
    """Puts a `/generate` stream together: pieces are cumulative, or deltas with incremental output."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.meta: dict[str, Any] = {}

    def add(self, piece: Any) -> None:
        """Take the next event.

        Raises:
            EndpointError: it carries an error.
        """
        if not isinstance(piece, dict) or "error" in piece:
            raise EndpointError(f"the stream carried an error: {str(piece)[:200]}", status=500)
        ids = list(piece.get("output_ids") or [])
        self.meta = piece.get("meta_info") or {}
        done = self.meta.get("completion_tokens")
        if done is None or len(ids) == done:
            self.text, self.ids = str(piece.get("text", "")), ids
        else:
            self.text += str(piece.get("text", ""))
            self.ids += ids

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return bool(self.ids or self.text)

    @property
    def ended(self) -> bool:
        """Whether the server said that this is all."""
        return self.meta.get("finish_reason") is not None

    def whole(self) -> dict[str, Any]:
        """The answer as it would have come without streaming."""
        return {"text": self.text, "output_ids": self.ids or None, "meta_info": self.meta}


class OpenAIPieces:
    """Puts a `/v1/completions` stream together: pieces are deltas, usage comes last."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.usage: dict[str, Any] = {}
        self.finish: Any = None

    def add(self, piece: Any) -> None:
        """Take the next event.

        Raises:
            EndpointError: it carries an error.
        """
        if not isinstance(piece, dict) or "error" in piece:
            raise EndpointError(f"the stream carried an error: {str(piece)[:200]}", status=500)
        for choice in piece.get("choices") or []:
            self.text += choice.get("text") or ""
            self.ids += choice.get("token_ids") or []
            self.finish = choice.get("finish_reason") or self.finish
        self.usage = piece.get("usage") or self.usage

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return bool(self.ids or self.text)

    @property
    def ended(self) -> bool:
        """Whether the server said that this is all."""
        return self.finish is not None

    def whole(self) -> dict[str, Any]:
        """The answer as it would have come without streaming."""
        choice = {"text": self.text, "token_ids": self.ids or None, "finish_reason": self.finish}
        return {"choices": [choice], "usage": self.usage}


def native_identity(info: Mapping[str, Any], name: str) -> Identity:
    """Who answers, from `/server_info`; `name` is what the model list calls the model."""
    algorithm = info.get("speculative_algorithm")
    dtype = info.get("dtype")
    return Identity(
        kind="embedded" if info.get("engine") == "ddtoolkit" else "sglang",
        version=str(info.get("version", "")),
        model=str(info.get("served_model_name") or name),
        algorithm=str(algorithm).upper() if algorithm else "NONE",
        block_size=_whole(info.get("speculative_dflash_block_size")),
        budget=_whole(info.get("speculative_ddtree_budget")),
        topk_cap=_whole(info.get("speculative_ddtree_topk_cap")),
        dtype=None if dtype in (None, "auto") else str(dtype),
    )


def native_body(ask: Ask) -> dict[str, Any]:
    """The body of `/generate`."""
    sampling: dict[str, Any] = {
        "max_new_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "ignore_eos": True,
    }
    if ask.seed is not None:
        sampling["sampling_seed"] = ask.seed
    if ask.tree is not None:
        sampling["custom_params"] = {"ddtree": dict(ask.tree)}
    if ask.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in ask.logit_bias.items()}
    body: dict[str, Any] = {"sampling_params": sampling}
    if isinstance(ask.prompt, str):
        body["text"] = ask.prompt
    else:
        body["input_ids"] = list(ask.prompt)
    if ask.salt is not None:
        body["extra_key"] = ask.salt
    return body


def openai_body(ask: Ask, identity: Identity, salt_field: str | None) -> dict[str, Any]:
    """The body of `/v1/completions`; `salt_field` is where that server takes a cache salt."""
    body: dict[str, Any] = {
        "model": identity.model,
        "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
    }
    if ask.seed is not None:
        body["seed"] = ask.seed
    if ask.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in ask.logit_bias.items()}
    if identity.kind != "openai":
        body["ignore_eos"] = True
    if identity.kind in ("embedded", "vllm"):
        body["return_token_ids"] = True
    if ask.salt is not None and salt_field is not None:
        body[salt_field] = ask.salt
    return body


def read_native(answer: Any) -> Generation:
    """An answer of `/generate`.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it lacks something.
    """
    meta = answer["meta_info"]
    histogram = meta.get("spec_correct_drafts_histogram")
    return Generation(
        text=str(answer.get("text") or ""),
        output_ids=_ids(answer.get("output_ids")),
        prompt_tokens=_whole(meta.get("prompt_tokens")),
        completion_tokens=_whole(meta.get("completion_tokens")),
        cached_tokens=_whole(meta.get("cached_tokens")),
        verify_steps=_whole(meta.get("spec_verify_ct")),
        correct_drafts=tuple(int(count) for count in histogram) if histogram else None,
    )


def read_openai(answer: Any) -> Generation:
    """An answer of `/v1/completions`.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it lacks something.
    """
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    return Generation(
        text=str(choice.get("text") or ""),
        output_ids=_ids(choice.get("token_ids")),
        prompt_ids=_ids(choice.get("prompt_token_ids")),
        prompt_tokens=_whole(usage.get("prompt_tokens")),
        completion_tokens=_whole(usage.get("completion_tokens")),
        cached_tokens=_whole((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(token) for token in value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
