"""What a profile needs of one GPU's memory, term by term, as SGLang 0.5.17 lays it out.

`--mem-fraction-static` parts the memory that is free before the load: weights and the K/V pool on one side;
activations, communication and what the CUDA graphs captured on the other. A profile fits when both sides do,
the pool being large enough for one request of the whole context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from toolkit.hardware.catalogue import Gpu, find_gpu
from toolkit.profile.memory.shapes import Shape, shapes
from toolkit.profile.memory.weights import stage_layers, weight_bytes
from toolkit.profile.schema import Parallelism, Profile

MIB, GIB = 1 << 20, 1 << 30
_OWN = GIB  # driver (616 MiB on an H200) and CUDA context: gone before SGLang looks
_BASE = 512 * MIB  # SGLang's own allowances, server_args.py, `_handle_gpu_memory_settings`
_A_PREFILL_TOKEN = 1.5 * MIB
_COMMUNICATION = GIB / 8  # a GPU of the group
_A_GRAPH_REQUEST = 2 * MIB
_MLA_PREFILL_GRAPH = 1536 * MIB
_LEAST_RESERVE = 10 * GIB  # on GPUs above 60 GiB
_IMAGES = GIB  # pool of image features on the first GPU, SGLANG_MM_FEATURE_CACHE_MB
_IMAGES_ON_HOST = "--mm-feature-transport"
_VISION_FACTOR = 0.91  # what SGLang makes of its own fraction for a tower of 27 layers x 1152
_KV_SPLITS = 8  # --triton-attention-num-kv-splits
_MLA_SPLIT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the sum: what it is, its bytes on one GPU, and how they come about."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """The sum for one GPU.

    Attributes:
        spread: how the model is spread.
        free: bytes before anything is loaded.
        fraction: part of `free` for weights and K/V.
        static: weights and K/V of the least pool.
        dynamic: everything else.
        token_bytes: K/V of one token, the drafter's included.
        least_tokens: one request of the whole context, with what a verification reserves.
    """

    spread: Parallelism
    free: int
    fraction: float
    static: tuple[Term, ...]
    dynamic: tuple[Term, ...]
    token_bytes: int
    least_tokens: int

    @property
    def static_bytes(self) -> int:
        """Weights and the least pool."""
        return sum(term.bytes for term in self.static)

    @property
    def dynamic_bytes(self) -> int:
        """Activations, communication, graphs."""
        return sum(term.bytes for term in self.dynamic)

    @property
    def static_room(self) -> int:
        """Bytes for weights and K/V."""
        return int(self.free * self.fraction)

    @property
    def dynamic_room(self) -> int:
        """Bytes for everything else."""
        return self.free - self.static_room

    @property
    def pool_tokens(self) -> int:
        """Tokens that the K/V pool would hold; negative if the weights alone do not fit."""
        weights = sum(term.bytes for term in self.static[:-1])
        return (self.static_room - weights) // self.token_bytes

    @property
    def fits(self) -> bool:
        """Whether both sides fit."""
        return self.static_bytes <= self.static_room and self.dynamic_bytes <= self.dynamic_room


def estimate(
    profile: Profile,
    spread: Parallelism | None = None,
    *,
    target: Shape | None = None,
    drafter: Shape | None = None,
) -> Estimate | None:
    """The sum for a profile, or for it spread otherwise; None where something is not known.

    Args:
        profile: with `hardware.gpu` of the catalogue, or `hardware.memory_gib`.
        spread: instead of the profile's own.
        target: instead of the shape that `model.target.shape` names.
        drafter: instead of the shape that `model.drafter.shape` names.
    """
    target = target or named_shape(profile.model.target.shape)
    drafter = drafter or (named_shape(profile.model.drafter.shape) if profile.model.drafter else None)
    memory = gpu_memory(profile)
    spread = spread or profile.parallelism
    speculates = profile.speculative.algorithm != "NONE"
    if profile.engine.kind != "sglang" or spread.dp_attention or target is None or memory is None:
        return None
    if speculates and drafter is None:
        return None
    need = _Need(
        profile, spread, target, drafter if speculates else None, find_gpu(profile.hardware.gpu or "")
    )
    dynamic = tuple(need.dynamic())
    free = memory - _OWN
    fraction = profile.engine.memory_fraction or _own_fraction(need.reserve, memory, target)
    return Estimate(
        spread, free, fraction, tuple(need.static()), dynamic, need.token_bytes, need.least_tokens
    )


def named_shape(name: str | None) -> Shape | None:
    """The shape of that name; None without one, or if it is not known."""
    return None if name is None else shapes().get(name)


def gpu_memory(profile: Profile) -> int | None:
    """Bytes of one GPU, by the profile or the catalogue; None where neither says."""
    gpu = find_gpu(profile.hardware.gpu or "")
    if gpu is not None:
        return gpu.memory_mib * MIB
    given = profile.hardware.memory_gib
    return None if given is None else int(given * GIB)


def width(profile: Profile) -> int:
    """Rows of one request in a decode step of the target."""
    spec = profile.speculative
    return {"NONE": 1, "DFLASH": spec.block_size, "DDTREE": spec.budget + 1}[spec.algorithm]


@dataclass(frozen=True, slots=True)
class _Need:
    profile: Profile
    spread: Parallelism
    target: Shape
    drafter: Shape | None
    gpu: Gpu | None

    @property
    def context(self) -> int:
        return self.profile.model.context_length or self.target.context

    @property
    def least_tokens(self) -> int:
        # Two verifications are reserved behind a request's tokens (allocation_sizing.py).
        return self.context + 2 * width(self.profile) * (self.drafter is not None)

    @property
    def batch(self) -> int:
        return self.profile.engine.max_graph_batch or self.profile.service.max_running_requests

    @property
    def token_bytes(self) -> int:
        """SGLang sizes both pools by the target's layers; a drafter with more K/V a layer takes more."""
        layers = max(stage_layers(self.target.layers, self.spread.pp))
        cell = self._cell(self.target)
        if self.drafter is None:
            return layers * cell
        return layers * cell + self.drafter.layers * max(cell, self._cell(self.drafter))

    def _cell(self, shape: Shape) -> int:
        """K/V bytes of one token in one layer on one GPU."""
        value = 1 if (self.profile.engine.kv_cache_dtype or "auto").startswith("fp8") else 2
        if shape.attention == "MLA":
            return (shape.kv_rank + shape.rope_dim) * value
        return 2 * max(1, shape.kv_heads // self.spread.tp) * shape.head_dim * value

    @property
    def reserve(self) -> float:
        """What SGLang would leave for everything but weights and K/V."""
        return sum(term.bytes for term in self._allowances())

    def static(self) -> Iterator[Term]:
        tp, pp = self.spread.tp, self.spread.pp
        whole = f" of {self.target.weight_bytes / GIB:.1f} GiB" if self.target.weight_bytes else ""
        yield Term("target weights", weight_bytes(self.target, tp, pp), f"{self.target.name}{whole}")
        if self.drafter is not None:
            yield Term("drafter weights", weight_bytes(self.drafter, tp), self.drafter.name)
        tokens = self.least_tokens
        yield Term("K/V", tokens * self.token_bytes, f"{tokens} tokens x {self.token_bytes} bytes")

    def dynamic(self) -> Iterator[Term]:
        yield from self._allowances()
        if self.target.other_bytes and not _images_on_host(self.profile):
            yield Term("image features", _IMAGES, f"on the first GPU; none with {_IMAGES_ON_HOST}=cpu")
        yield from self._graph()

    def _allowances(self) -> Iterator[Term]:
        chunk = max(self.profile.engine.prefill_chunk or default_chunk(self.profile), 2048)
        group = self.spread.tp * self.spread.pp
        yield Term("base", _BASE, "SGLang's allowance")
        yield Term("activations", int(chunk * _A_PREFILL_TOKEN), f"{chunk} prefill tokens x 1.5 MiB")
        yield Term("communication", int(group * _COMMUNICATION), f"{group} GPUs x 128 MiB")
        yield Term("decode graphs", self.batch * _A_GRAPH_REQUEST, f"{self.batch} requests x 2 MiB")
        if self.target.attention == "MLA":
            yield Term("prefill graph", _MLA_PREFILL_GRAPH, "SGLang's allowance for MLA")

    def _graph(self) -> Iterator[Term]:
        """Buffers of the triton backend that a graph is captured with (triton_backend.py)."""
        n, batch, context = width(self.profile), self.batch, self.context
        rows = batch * n
        block = self.profile.speculative.block_size if self.drafter is not None else 0
        indices = batch * (n + block) * context * 8
        yield Term("K/V indices", indices, f"{batch} x ({n} + {block}) x {context} x 8 bytes")
        if self.drafter is not None:
            mask = batch * n * (context + n)
            yield Term("verify mask", mask, f"{batch} x {n} x ({context} + {n})")
        logits = rows * self.target.vocabulary * 4
        yield Term("verify logits", logits, f"{rows} x {self.target.vocabulary} x 4 bytes")
        heads, splits, values = self._partials()
        partial = rows * heads * splits * values * 4
        yield Term("attention partials", partial, f"{rows} x {heads} heads x {splits} splits x {values} x 4")

    def _partials(self) -> tuple[int, int, int]:
        """Heads of one GPU, splits of the context, values of each: fp32 partial sums of split decoding."""
        heads = max(1, self.target.heads // self.spread.tp)
        if self.target.attention == "MHA":
            return heads, _KV_SPLITS, self.target.head_dim
        processors = self.gpu.multiprocessors if self.gpu is not None else 256
        splits = min(_power_of_2(processors), _power_of_2(-(-self.context // _MLA_SPLIT_TOKENS)))
        return heads, max(_KV_SPLITS, splits), self.target.kv_rank


def default_chunk(profile: Profile) -> int:
    """SGLang's own prefill chunk, by the memory of the GPU."""
    memory = (gpu_memory(profile) or 0) / GIB
    for most, chunk in ((35, 2048), (60, 4096), (160, 8192)):
        if memory < most:
            return chunk
    return 16384


def _own_fraction(reserve: float, memory: int, target: Shape) -> float:
    """What SGLang sets where the profile does not."""
    least = _LEAST_RESERVE if memory > 60 * GIB else 0
    fraction = 1 - max(reserve, least) / memory
    return fraction * (_VISION_FACTOR if target.other_bytes else 1)


def _images_on_host(profile: Profile) -> bool:
    words = profile.engine.extra_args
    return f"{_IMAGES_ON_HOST}=cpu" in words or (_IMAGES_ON_HOST, "cpu") in pairwise(words)


def _power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
