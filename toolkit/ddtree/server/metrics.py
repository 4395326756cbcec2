"""Prometheus metrics with SGLang's names; the ones that SGLang lacks are named `ddtree:*`.

Each token, request and verify step is counted once, under one `mode` and one `expansion`, so that a sum over
those labels is the total.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from toolkit.ddtree.server.generation import Generation
from toolkit.ddtree.types import Algorithm, EngineConfig, FinishReason, Output, RoundStats

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` series beside each counter doubles the page and SGLang has none

_BY_MODE = ("model_name", "mode", "expansion")
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)
_TOKEN_LATENCY = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.4, 1, 4)


class Metrics:
    """Counts what the engine gave to requests; an observer of `EngineRunner`.

    Args:
        model_name: label of every metric.
        config: the engine's; its algorithm and tree limits label requests that bring none.
    """

    def __init__(self, model_name: str, config: EngineConfig) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._config = config
        self._verify_steps = 0
        self._verified_tokens = 0
        self._prompt_tokens = self._counter("sglang:prompt_tokens", "Prompt tokens, cached ones included.")
        self._cached_tokens = self._counter(
            "sglang:cached_tokens", "Prompt tokens taken from the prefix cache."
        )
        self._generated = self._counter("sglang:generation_tokens", "Tokens generated.")
        self._requests = self._counter("sglang:num_requests", "Requests ended, aborted ones included.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Requests that ended before their time.")
        self._verify_calls = self._counter(
            "sglang:spec_verify_calls", "Verify steps, one a request and round."
        )
        self._correct = self._counter(
            "ddtree:correct_drafts", "Draft tokens that matched the target's choice."
        )
        self._drafted = self._counter("ddtree:draft_nodes", "Tree nodes verified, without root and padding.")
        self._accepted = Counter(
            "ddtree:verify_steps_by_accepted",
            "Verify steps by the number of draft tokens that matched.",
            (*_BY_MODE, "accepted"),
            registry=self.registry,
        )
        self._first_token = self._histogram("sglang:time_to_first_token_seconds", _LATENCY)
        self._inter_token = self._histogram("sglang:inter_token_latency_seconds", _TOKEN_LATENCY)
        self._e2e = self._histogram("sglang:e2e_request_latency_seconds", _LATENCY)
        self._running = self._gauge("sglang:num_running_reqs", "Requests in the batch.")
        self._queued = self._gauge("sglang:num_queue_reqs", "Requests waiting.")
        self._accept_length = self._gauge(
            "sglang:spec_accept_length", "Tokens per verify step since the start."
        )
        self._hit_rate = self._gauge(
            "sglang:cache_hit_rate", "Cached share of all prompt tokens since the start."
        )
        self._cache_size = self._gauge("ddtree:prefix_cache_tokens", "Tokens held by the prefix cache.")
        self._lost_lines = self._gauge("ddtree:debug_lines_lost", "Debug lines that could not be written.")
        self._prompt_seen = 0
        self._cached_seen = 0

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step since the start; None before the first step."""
        return self._verified_tokens / self._verify_steps if self._verify_steps else None

    def on_output(self, generation: Generation, output: Output, now: float) -> None:
        """Count one round's tokens of one request."""
        if not generation.counted:
            return
        labels = self._labels(generation)
        count = len(output.token_ids)
        self._generated.labels(*labels).inc(count)
        if generation.first_token is None and count:
            self._count_prompt(generation, output, labels)
            self._first_token.labels(*labels).observe(now - generation.created)
        elif generation.last_token is not None:
            for _ in range(count):
                self._inter_token.labels(*labels).observe((now - generation.last_token) / count)
        if output.round is not None:
            self._count_round(output.round, labels)

    def on_end(self, generation: Generation, now: float) -> None:
        """Count the end of one request."""
        if not generation.counted:
            return
        labels = self._labels(generation)
        self._requests.labels(*labels).inc()
        self._e2e.labels(*labels).observe(now - generation.created)
        if generation.error is not None or generation.finish is FinishReason.ABORT:
            self._aborted.labels(*labels).inc()

    def render(self, *, running: int, queued: int, cached_tokens: int, lost_lines: int) -> bytes:
        """The Prometheus text format, with the gauges set to the given values."""
        self._running.labels(self._model_name).set(running)
        self._queued.labels(self._model_name).set(queued)
        self._cache_size.labels(self._model_name).set(cached_tokens)
        self._lost_lines.labels(self._model_name).set(lost_lines)
        self._accept_length.labels(self._model_name).set(self.accept_length or 0)
        self._hit_rate.labels(self._model_name).set(self._cached_seen / max(1, self._prompt_seen))
        return generate_latest(self.registry)

    def _count_prompt(self, generation: Generation, output: Output, labels: tuple[str, ...]) -> None:
        prompt = len(generation.request.input_ids)
        cached = max(generation.cached_tokens, output.cached_tokens)
        self._prompt_tokens.labels(*labels).inc(prompt)
        self._cached_tokens.labels(*labels).inc(cached)
        self._prompt_seen += prompt
        self._cached_seen += cached

    def _count_round(self, stats: RoundStats, labels: tuple[str, ...]) -> None:
        self._verify_steps += 1
        self._verified_tokens += stats.committed
        self._verify_calls.labels(*labels).inc()
        self._correct.labels(*labels).inc(stats.accepted)
        self._drafted.labels(*labels).inc(stats.nodes)
        self._accepted.labels(*labels, str(stats.accepted)).inc()

    def _labels(self, generation: Generation) -> tuple[str, str, str]:
        if self._config.algorithm is not Algorithm.DDTREE:
            return self._model_name, str(self._config.algorithm), ""
        limits = generation.request.limits or self._config.limits
        return self._model_name, str(self._config.algorithm), str(limits.expansion)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _BY_MODE, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.partition(":")[2].replace("_", " ").capitalize() + "."
        return Histogram(name, text, _BY_MODE, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self.registry)
