"""From generations to answers: text, SGLang's `/generate` objects and the OpenAI API's, whole or streamed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from toolkit.ddtree.server.errors import ApiError
from toolkit.ddtree.server.generation import Generation
from toolkit.ddtree.server.protocol import StreamOptions
from toolkit.ddtree.server.requests import Job
from toolkit.ddtree.server.runner import EngineRunner
from toolkit.ddtree.server.text import Decode, TextStream
from toolkit.ddtree.types import FinishReason, TreeLimits

DONE = "data: [DONE]\n\n"


class Tokenizer(Protocol):
    """What is needed of a `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids -> text."""


class Answer:
    """The text of one generation, brought up to date by `advance`.

    Args:
        job: how the text is to be rendered.
        generation: where its tokens come from.
        tokenizer: renders them.
    """

    def __init__(self, job: Job, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._job = job
        self._stream = TextStream(
            self._decoder(tokenizer), job.request.sampling.stop if job.trim_stop else ()
        )
        self._read = 0

    @property
    def text(self) -> str:
        """The text so far."""
        return self._stream.text

    def advance(self) -> tuple[str, list[int]]:
        """The text and the tokens that came since the last call."""
        generation = self.generation
        tokens = generation.output_ids[self._read :]
        self._read += len(tokens)
        visible = tokens
        if (
            generation.finish is FinishReason.STOP
            and isinstance(generation.matched, int)
            and self._job.trim_stop
        ):
            visible = tokens[:-1]
        if not generation.done:
            return self._stream.push(visible), tokens
        matched = generation.matched if isinstance(generation.matched, str) else None
        return self._stream.finish(visible, matched), tokens

    def finish_reason(self) -> dict[str, Any] | None:
        """SGLang's `finish_reason` object; None while it goes on."""
        generation = self.generation
        if generation.finish is None:
            return None
        reason: dict[str, Any] = {"type": str(generation.finish)}
        if generation.finish is FinishReason.STOP:
            reason["matched"] = generation.matched
        elif generation.finish is FinishReason.LENGTH:
            reason["length"] = len(generation.output_ids)
        else:
            reason["message"] = "The request was aborted."
        return reason

    def _decoder(self, tokenizer: Tokenizer) -> Decode:
        skip = self._job.skip_special_tokens
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=skip)


async def whole(runner: EngineRunner, answers: Sequence[Answer]) -> None:
    """Wait until all have ended.

    Raises:
        ApiError: the engine failed (500), or the server stopped before one ended (503).
    """
    async with aclosing(_updates(runner, answers)) as updates:
        async for _, answer in updates:
            if answer.generation.error is not None:
                raise answer.generation.error
            if answer.generation.finish is FinishReason.ABORT:
                raise ApiError(503, "The request was ended before its output was complete; try again.")
            if answer.generation.done:
                answer.advance()


async def _updates(
    runner: EngineRunner, answers: Sequence[Answer]
) -> AsyncGenerator[tuple[int, Answer], None]:
    async with aclosing(runner.updates([answer.generation for answer in answers])) as updates:
        async for index, _ in updates:
            yield index, answers[index]


def generate_object(answer: Answer, server_limits: TreeLimits | None) -> dict[str, Any]:
    """One object of `/generate`: text and tokens so far, and `meta_info`."""
    return {
        "text": answer.text,
        "output_ids": list(answer.generation.output_ids),
        "meta_info": _meta_info(answer, server_limits),
    }


async def generate_stream(
    runner: EngineRunner, answers: Sequence[Answer], server_limits: TreeLimits | None, *, is_batch: bool
) -> AsyncIterator[str]:
    """Server-sent events of `/generate`: as in SGLang, each event carries the whole text so far."""
    async for index, answer in _updates(runner, answers):
        answer.advance()
        if answer.generation.error is not None:
            yield event(answer.generation.error.body())
            continue
        item = generate_object(answer, server_limits)
        yield event(item | {"index": index} if is_batch else item)
    yield DONE


def _meta_info(answer: Answer, server_limits: TreeLimits | None) -> dict[str, Any]:
    generation = answer.generation
    info: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": answer.finish_reason(),
        "prompt_tokens": len(generation.request.input_ids),
        "weight_version": "default",
        "completion_tokens": len(generation.output_ids),
        "cached_tokens": generation.cached_tokens,
    }
    if generation.done:
        info["e2e_latency"] = (generation.last_token or time.monotonic()) - generation.created
    steps = generation.verify_steps
    if steps:
        # SGLang's definition; the first token, which comes from prefill, is in it.
        info["spec_accept_length"] = len(generation.output_ids) / steps
        info["spec_verify_ct"] = steps
        info["spec_num_correct_drafts"] = generation.correct_drafts
        info["spec_num_proposed_drafts"] = generation.drafted
        info["spec_correct_drafts_histogram"] = list(generation.accepted)
    limits = generation.request.limits or server_limits
    if limits is not None:
        info["ddtree"] = {
            "budget": limits.budget,
            "topk_cap": limits.topk_cap,
            "expansion": str(limits.expansion),
        }
    return info


class OpenAIFormat:
    """Builds the OpenAI API's objects for one HTTP request.

    Args:
        id: of the answer; all its chunks carry it.
        model: the served model's name.
        chat: whether it answers `/v1/chat/completions` rather than `/v1/completions`.
        token_ids: whether choices carry `token_ids` (and whole ones `prompt_token_ids`).
    """

    def __init__(self, id: str, model: str, *, chat: bool, token_ids: bool) -> None:  # noqa: A002
        self._base: dict[str, Any] = {"id": id, "created": int(time.time()), "model": model}
        self._chat = chat
        self._token_ids = token_ids

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._base, "object": kind, "choices": choices, "usage": usage(answers)}

    def chunk(
        self,
        index: int,
        delta: str | None,
        answer: Answer,
        tokens: Sequence[int] = (),
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        """One streamed chunk; `delta` None makes the last one of a choice, which says why it ended."""
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
        }
        if delta is None:
            choice |= self._end(answer)
        if self._chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({} if delta is None else {"content": delta})
        else:
            choice["text"] = delta or ""
        if self._token_ids:
            choice["token_ids"] = list(tokens)
        return self._envelope([choice])

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk without choices that ends a stream whose usage was asked for."""
        return self._envelope([]) | {"usage": usage(answers)}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._base, "object": kind, "choices": choices}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": None, **self._end(answer)}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        if self._token_ids:
            choice["token_ids"] = list(answer.generation.output_ids)
            choice["prompt_token_ids"] = list(answer.generation.request.input_ids)
        return choice

    @staticmethod
    def _end(answer: Answer) -> dict[str, Any]:
        reason = answer.finish_reason() or {}
        return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


async def openai_stream(
    runner: EngineRunner, answers: Sequence[Answer], form: OpenAIFormat, options: StreamOptions | None
) -> AsyncIterator[str]:
    """Server-sent events of the OpenAI endpoints."""
    include_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    started: set[int] = set()

    def numbered(chunk: dict[str, Any], answer: Answer) -> str:
        if continuous:
            chunk["usage"] = usage([answer])
        elif include_usage:
            chunk["usage"] = None
        return event(chunk)

    async for index, answer in _updates(runner, answers):
        delta, tokens = answer.advance()
        if answer.generation.error is not None:
            yield event(answer.generation.error.body())
            continue
        if delta or tokens:
            yield numbered(form.chunk(index, delta, answer, tokens, first=index not in started), answer)
            started.add(index)
        if answer.generation.done:
            yield numbered(form.chunk(index, None, answer, first=index not in started), answer)
    if include_usage:
        yield event(form.usage_chunk(answers))
    yield DONE


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """The OpenAI API's token counts over all choices."""
    prompt = sum(len(answer.generation.request.input_ids) for answer in answers)
    completion = sum(len(answer.generation.output_ids) for answer in answers)
    cached = sum(answer.generation.cached_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event(item: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(item, ensure_ascii=False)}\n\n"
