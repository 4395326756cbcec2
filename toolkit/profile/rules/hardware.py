"""Rules of engines, devices and how a model is spread over them."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.profile.rules.arguments import option
from toolkit.profile.rules.finding import Finding, doubt, error
from toolkit.profile.schema import Profile

_SGLANG_KEYS = (
    "version",
    "attention_backend",
    "quantization",
    "kv_cache_dtype",
    "moe_backend",
    "memory_fraction",
    "prefill_chunk",
    "page_size",
    "max_graph_batch",
)


def hardware_rules(profile: Profile) -> Iterator[Finding]:
    """Engine against device, device against GPU keys, parallelism against the number of GPUs."""
    yield from _device(profile)
    yield from _embedded(profile) if profile.engine.kind == "embedded" else _sglang(profile)


def _device(profile: Profile) -> Iterator[Finding]:
    hardware = profile.hardware
    if hardware.device == "cuda":
        if hardware.count == 0:
            yield error("cuda needs at least one GPU", "hardware.count", "hardware.device", hint="1")
        return
    set_keys = {
        "count": hardware.count != 0,
        "gpu": hardware.gpu is not None,
        "memory_gib": hardware.memory_gib is not None,
        "compute_capability": hardware.compute_capability is not None,
        "interconnect": hardware.interconnect != "none",
        "min_driver": hardware.min_driver is not None,
        "cuda": hardware.cuda is not None,
    }
    for name, is_set in set_keys.items():
        if is_set:
            hint = "take it out, or set hardware.device to cuda"
            yield error(
                "is for GPUs, and the device is cpu", f"hardware.{name}", "hardware.device", hint=hint
            )


def _embedded(profile: Profile) -> Iterator[Finding]:
    if profile.hardware.device == "cuda" and profile.hardware.count > 1:
        yield error(
            f"the embedded engine uses one GPU at most, not {profile.hardware.count}",
            "hardware.count",
            "engine.kind",
            hint="1, or engine.kind sglang",
        )
    for name in ("tp", "pp", "ep"):
        if getattr(profile.parallelism, name) > 1:
            yield error(
                "the embedded engine does not spread a model over GPUs",
                f"parallelism.{name}",
                "engine.kind",
                hint="1, or engine.kind sglang",
            )
    for name in _SGLANG_KEYS:
        if getattr(profile.engine, name) is not None:
            yield error("is for engine.kind sglang only", f"engine.{name}", "engine.kind", hint="take it out")


def _sglang(profile: Profile) -> Iterator[Finding]:
    engine, hardware = profile.engine, profile.hardware
    if engine.version is None:
        yield error("sglang needs a pinned version", "engine.version", "engine.kind", hint="0.5.17")
    if engine.threads is not None:
        yield error("is for the embedded engine only", "engine.threads", "engine.kind", hint="take it out")
    if hardware.device != "cuda":
        yield error("sglang needs GPUs", "hardware.device", "engine.kind", hint="cuda")
        return
    yield from _spread(profile)
    yield from _graphs(profile)


def _spread(profile: Profile) -> Iterator[Finding]:
    spread = profile.parallelism
    nodes = option(profile.engine.extra_args, "--nnodes")
    gpus = profile.hardware.count * (int(nodes) if nodes is not None and nodes.isdecimal() else 1)
    keys = ("parallelism.tp", "parallelism.pp", "hardware.count", "engine.extra_args")
    if spread.tp * spread.pp > gpus:
        yield error(f"tp x pp = {spread.tp} x {spread.pp} needs more than the {gpus} GPUs", *keys)
    elif spread.tp * spread.pp < gpus:
        yield doubt(f"tp x pp = {spread.tp} x {spread.pp} leaves GPUs of the {gpus} unused", *keys)
    if spread.tp % spread.ep:
        yield error(
            f"ep = {spread.ep} does not divide tp = {spread.tp}: experts are spread over the same GPUs",
            "parallelism.ep",
            "parallelism.tp",
        )


def _graphs(profile: Profile) -> Iterator[Finding]:
    largest, running = profile.engine.max_graph_batch, profile.service.max_running_requests
    if largest is not None and largest < running:
        yield doubt(
            f"{largest} requests are below max_running_requests = {running}: larger batches use no graph",
            "engine.max_graph_batch",
            "service.max_running_requests",
        )
