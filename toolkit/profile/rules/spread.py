"""Rules of how a model is spread over GPUs: what its heads, experts and layers allow, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.profile.memory.estimate import GIB, Estimate, estimate, named_shape
from toolkit.profile.memory.shapes import Shape, shapes
from toolkit.profile.rules.finding import Finding, doubt, error
from toolkit.profile.schema import Profile

_TP, _PP, _EP = "parallelism.tp", "parallelism.pp", "parallelism.ep"
_MEMORY_KEYS = (
    "hardware.gpu",
    "hardware.memory_gib",
    "parallelism",
    "model",
    "engine.memory_fraction",
    "engine.prefill_chunk",
    "engine.kv_cache_dtype",
    "engine.max_graph_batch",
    "service.max_running_requests",
    "speculative",
)


def spread_rules(profile: Profile) -> Iterator[Finding]:
    """Shapes against parallelism, context and block; the sum of memory."""
    yield from _known(profile)
    model = profile.model
    if profile.engine.kind == "sglang":
        drafter = None if model.drafter is None else named_shape(model.drafter.shape)
        yield from spread_findings(profile, named_shape(model.target.shape), drafter)


def spread_findings(profile: Profile, target: Shape | None, drafter: Shape | None) -> Iterator[Finding]:
    """What stands against spreading these checkpoints as the profile says; None: the shape is not known."""
    if profile.speculative.algorithm == "NONE":
        drafter = None
    if target is not None and not target.is_drafter:
        yield from _target(profile, target)
    if drafter is not None and drafter.is_drafter:
        yield from _drafter(profile, drafter, target)
    if (found := estimate(profile, target=target, drafter=drafter)) is not None:
        yield from _memory(found)


def _known(profile: Profile) -> Iterator[Finding]:
    for role in ("target", "drafter"):
        checkpoint, key = getattr(profile.model, role), f"model.{role}.shape"
        if checkpoint is None or checkpoint.shape is None:
            continue
        shape = named_shape(checkpoint.shape)
        of_role = ", ".join(name for name, one in shapes().items() if one.is_drafter == (role == "drafter"))
        if shape is None:
            yield error(
                f"{checkpoint.shape!r} is not known", key, hint=f"there is: {of_role}; or take it out"
            )
        elif shape.is_drafter != (role == "drafter"):
            is_a = "drafter" if shape.is_drafter else "target"
            yield error(f"{shape.name} is a {is_a}, not a {role}", key, hint=f"one of {of_role}")


def _target(profile: Profile, shape: Shape) -> Iterator[Finding]:
    spread, context = profile.parallelism, profile.model.context_length
    key = "model.target.shape"
    yield from _heads(spread.tp, shape, key)
    if spread.pp > shape.layers:
        yield error(f"pp = {spread.pp} is more than the {shape.layers} layers of {shape.name}", _PP, key)
    if spread.ep > 1 and not shape.experts:
        yield error(f"{shape.name} has no experts to spread", _EP, key, hint="1")
    elif shape.experts and shape.experts % spread.ep:
        yield error(f"ep = {spread.ep} does not divide the {shape.experts} experts of {shape.name}", _EP, key)
    elif shape.experts and not spread.tp % spread.ep:
        parts, width = spread.tp // spread.ep, shape.expert_intermediate
        if width % parts:
            yield error(f"tp / ep = {parts} does not divide the width of an expert, {width}", _TP, _EP, key)
    if context is not None and context > shape.context:
        yield error(
            f"{context} is more than {shape.name} was made for, {shape.context}",
            "model.context_length",
            key,
            hint=f"at most {shape.context}",
        )


def _drafter(profile: Profile, shape: Shape, target: Shape | None) -> Iterator[Finding]:
    block, key = profile.speculative.block_size, "model.drafter.shape"
    yield from _heads(profile.parallelism.tp, shape, key)
    if block != shape.block_size:
        yield doubt(
            f"{block} slots; {shape.name} was trained with {shape.block_size}",
            "speculative.block_size",
            key,
            hint=str(shape.block_size),
        )
    if target is None or target.is_drafter:
        return
    if (shape.hidden, shape.vocabulary) != (target.hidden, target.vocabulary):
        yield error(
            f"{shape.name} reads hidden states of {shape.hidden} and draws from {shape.vocabulary} tokens; "
            f"{target.name} has {target.hidden} and {target.vocabulary}",
            key,
            "model.target.shape",
            hint="a drafter belongs to the target that it was trained on",
        )


def _heads(tp: int, shape: Shape, key: str) -> Iterator[Finding]:
    if shape.heads % tp:
        yield error(f"tp = {tp} does not divide the {shape.heads} attention heads of {shape.name}", _TP, key)
    elif shape.attention == "MHA" and shape.kv_heads % tp and tp % shape.kv_heads:
        yield error(
            f"tp = {tp} neither divides nor is a multiple of the {shape.kv_heads} K/V heads", _TP, key
        )


def _memory(found: Estimate) -> Iterator[Finding]:
    spread = found.spread
    where = f"a GPU of tp {spread.tp} x pp {spread.pp} x ep {spread.ep}"
    if found.static_bytes > found.static_room:
        said = _sum([(term.name, term.bytes) for term in found.static], found.static_bytes)
        yield error(
            f"does not fit: {said} on {where}; memory_fraction {found.fraction:.3f} of "
            f"{gib(found.free)} leaves {gib(found.static_room)}",
            *_keys("parallelism.tp" if found.pool_tokens <= 0 else "engine.memory_fraction"),
            hint=_static_hint(found),
        )
    if found.dynamic_bytes > found.dynamic_room:
        said = _sum([(term.name, term.bytes) for term in found.dynamic], found.dynamic_bytes)
        yield error(
            f"no room beside weights and K/V: {said} on {where}; memory_fraction {found.fraction:.3f} of "
            f"{gib(found.free)} leaves {gib(found.dynamic_room)}",
            *_keys("engine.memory_fraction"),
            hint="a smaller memory_fraction, engine.prefill_chunk, max_running_requests or context_length",
        )


def _static_hint(found: Estimate) -> str:
    if found.pool_tokens <= 0:
        return "more GPUs, or a smaller checkpoint"
    least = found.static_bytes / found.free
    room = found.free - found.dynamic_bytes
    if found.static_bytes <= room:
        return f"engine.memory_fraction from {least + 0.0005:.3f} to {room / found.free:.3f}"
    return f"{found.pool_tokens} tokens would fit: a smaller model.context_length, or kv_cache_dtype fp8_e4m3"


def _keys(first: str) -> tuple[str, ...]:
    return (first, *(key for key in _MEMORY_KEYS if key != first))


def _sum(terms: list[tuple[str, int]], total: int) -> str:
    return " + ".join(f"{name} {size / GIB:.1f}" for name, size in terms) + f" = {gib(total)}"


def gib(size: int) -> str:
    """Bytes for people: `94.6 GiB`."""
    return f"{size / GIB:.1f} GiB"
