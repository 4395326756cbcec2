"""Counters and gauges of a server's `/metrics`, under one set of names for SGLang and vLLM.

Format: Prometheus text exposition format 0.0.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

# Our names, each with the server's names for it, in the order in which they are looked for.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "requests": ("sglang:num_requests_total", "vllm:request_success_total"),
    "prompt_tokens": ("sglang:prompt_tokens_total", "vllm:prompt_tokens_total"),
    "completion_tokens": ("sglang:generation_tokens_total", "vllm:generation_tokens_total"),
    "cached_tokens": ("sglang:cached_tokens_total",),
    "verify_steps": ("sglang:spec_verify_calls_total", "vllm:spec_decode_num_drafts_total"),
    "matched_drafts": ("vllm:spec_decode_num_accepted_tokens_total",),
}
GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "waiting": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
}

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*$")


def parse_metrics(text: str) -> dict[str, float]:
    """Values by metric name, summed over all label sets; what is no sample is passed over."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            values[match[1]] = values.get(match[1], 0.0) + value
    return values


def pick(values: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Those of `names` that the server exposes, under our names."""
    found: dict[str, float] = {}
    for ours, theirs in names.items():
        present = [values[name] for name in theirs if name in values]
        if present:
            found[ours] = present[0]
    return found
