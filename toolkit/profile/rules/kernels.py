"""Rules of attention backends, quantized weights and experts' kernels (SGLang 0.5.17, `server_args.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.hardware.catalogue import find_gpu
from toolkit.profile.memory.estimate import named_shape
from toolkit.profile.memory.shapes import Shape
from toolkit.profile.rules.finding import Finding, error
from toolkit.profile.rules.tables import (
    BACKEND_ATTENTION,
    BACKEND_GPUS,
    EXPERT_KERNELS,
    EXPERTS_WHOLE,
    EXPERTS_WHOLE_FP8,
)
from toolkit.profile.schema import Profile

_ONLINE = ("fp8", "mxfp8")  # what SGLang makes of bf16 weights while it loads them
_MOE, _QUANTIZATION, _SHAPE = "engine.moe_backend", "engine.quantization", "model.target.shape"


def kernel_rules(profile: Profile) -> Iterator[Finding]:
    """Attention against GPU and model, quantization against the checkpoint, experts' kernels against all."""
    if profile.engine.kind != "sglang":
        return
    shape = named_shape(profile.model.target.shape)
    if profile.engine.attention_backend is not None:
        yield from _attention(profile, profile.engine.attention_backend, shape)
    if shape is not None:
        yield from _quantization(profile, shape)
    packed = profile.engine.quantization or (None if shape is None else shape.quantization)
    if profile.engine.moe_backend is not None:
        yield from _experts(profile, profile.engine.moe_backend, packed)


def _attention(profile: Profile, backend: str, shape: Shape | None) -> Iterator[Finding]:
    capability = profile.hardware.compute_capability
    if capability is None and (gpu := find_gpu(profile.hardware.gpu or "")) is not None:
        capability = gpu.compute_capability
    major, name = BACKEND_GPUS.get(backend, (None, ""))
    if major is not None and capability is not None and capability.partition(".")[0] != major:
        yield error(
            f"{backend} runs on compute capability {major} ({name}) only, not on {capability}",
            "engine.attention_backend",
            "hardware.compute_capability",
            "hardware.gpu",
            hint="triton",
        )
    attention = BACKEND_ATTENTION.get(backend)
    if attention is not None and shape is not None and shape.attention != attention:
        yield error(
            f"{backend} is for {attention} models, and {shape.name} has {shape.attention}",
            "engine.attention_backend",
            _SHAPE,
            hint="triton",
        )


def _quantization(profile: Profile, shape: Shape) -> Iterator[Finding]:
    given = profile.engine.quantization
    if given is None or given == shape.quantization or (not shape.quantization and given in _ONLINE):
        return
    packed = f"packed by {shape.quantization}" if shape.quantization else "not quantized"
    yield error(f"{shape.name} is {packed}, not by {given}", _QUANTIZATION, _SHAPE, hint="take it out")


def _experts(profile: Profile, backend: str, packed: str | None) -> Iterator[Finding]:
    allowed = EXPERT_KERNELS.get(backend)
    if allowed is not None and packed is not None and packed not in allowed:
        able = ", ".join(name or "bf16" for name in sorted(allowed))
        yield error(
            f"{backend} computes experts of {able}, not of {packed or 'bf16'}",
            _MOE,
            _QUANTIZATION,
            _SHAPE,
            hint="take it out: SGLang then chooses",
        )
    spread = profile.parallelism
    divided = spread.ep not in (1, spread.tp)
    if backend in EXPERTS_WHOLE and divided:
        yield error(
            f"ep = {spread.ep}: {backend} takes 1, or experts whole on each GPU, ep = tp = {spread.tp}",
            "parallelism.ep",
            "parallelism.tp",
            _MOE,
        )
    if backend in EXPERTS_WHOLE_FP8 and packed in _ONLINE and spread.ep > 1:
        yield error(
            f"ep = {spread.ep}: {backend} with {packed} takes 1",
            "parallelism.ep",
            _MOE,
            _QUANTIZATION,
            hint="1",
        )
