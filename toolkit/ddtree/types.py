"""Values that cross the engine's borders: configuration, requests, and what one round gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Algorithm(StrEnum):
    """How tokens are decoded."""

    NONE = "NONE"
    DFLASH = "DFLASH"
    DDTREE = "DDTREE"


class Expansion(StrEnum):
    """Tree policy: which prefixes of the drafter's block become nodes.

    `TRANSITION` scores each candidate by the token before it, and needs a table in the drafter's checkpoint.
    """

    CHAIN = "chain"
    BEST_FIRST = "best_first"
    CHAIN_SEEDED = "chain_seeded"
    TRANSITION = "transition"


class FinishReason(StrEnum):
    """Why a request ended, in the OpenAI API's words (`abort` is SGLang's)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits of one draft tree.

    Attributes:
        budget: tree nodes without the root; the verify width is budget + 1.
        topk_cap: how many of the drafter's candidates a slot offers (ranks 0 .. topk_cap - 1).
        expansion: the tree policy.
    """

    budget: int
    topk_cap: int
    expansion: Expansion = Expansion.BEST_FIRST


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of the sampler, with SGLang's field names and defaults.

    `temperature` 0 is greedy. `top_k` -1 keeps every token. `sampling_seed` None draws a fresh seed.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request as the engine takes it.

    Attributes:
        rid: unique id of the request.
        input_ids: prompt tokens, at least one.
        sampling: sampling parameters.
        limits: tree limits of this request; None takes the server's own. Never above the server's own.
        extra_key: cache salt; requests with different salts never share prefix K/V.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: TreeLimits | None = None
    extra_key: str = ""


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One verify step of one request: the debug line's content.

    Attributes:
        nodes: tree nodes without root and padding.
        depth: depth of the deepest node.
        accepted: matched draft tokens.
        committed: tokens committed, the bonus token included.
        chain_in_tree: whether the whole greedy chain is in the tree.
        ranks: drafter rank of each accepted token, by depth.
        reject_rank: drafter rank of the target's token at the first rejected depth; -1 outside the
            top-k; None if nothing was rejected (the path reached the end of the block).
    """

    nodes: int
    depth: int
    accepted: int
    committed: int
    chain_in_tree: bool
    ranks: tuple[int, ...]
    reject_rank: int | None


@dataclass(slots=True)
class Output:
    """What one round gave one request.

    Attributes:
        rid: the request.
        token_ids: tokens newly committed to the output, in order.
        finish: why it ended, or None while it goes on.
        matched: the stop token id or stop string that ended it.
        cached_tokens: prompt tokens taken from the prefix cache.
        round: statistics of the verify step; None for a prefill or a plain decode step.
    """

    rid: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    matched: int | str | None = None
    cached_tokens: int = 0
    round: RoundStats | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine.

    Attributes:
        model_path: target checkpoint directory (Hugging Face layout).
        draft_model_path: DFlash drafter directory; needed unless `algorithm` is NONE.
        algorithm: decoding algorithm.
        limits: the server's tree limits, the upper bound of each request's.
        block_size: drafted slots, bonus token included; None takes the drafter's own.
        dtype: "float32" or "bfloat16".
        device: "cpu" or "cuda".
        context_length: longest prompt + output in tokens; None takes the checkpoint's.
        max_running_requests: requests decoded in one batch.
        prefix_cache_tokens: tokens of K/V kept for reuse between requests; 0 switches the cache off.
        threads: CPU threads of torch; None leaves torch's default.
        random_seed: seeds the seeds of requests that bring none.
    """

    model_path: Path
    draft_model_path: Path | None = None
    algorithm: Algorithm = Algorithm.DDTREE
    limits: TreeLimits = TreeLimits(budget=16, topk_cap=8)
    block_size: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    context_length: int | None = None
    max_running_requests: int = 16
    prefix_cache_tokens: int = 16384
    threads: int | None = None
    random_seed: int = 0
