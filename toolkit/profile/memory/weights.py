"""Bytes of weights that one GPU holds, as SGLang 0.5.17 spreads a model.

Tensor parallelism splits what is computed a head or a column at a time; the projections down to MLA's
latents, routers, norms and vision towers lie whole on each GPU. Expert parallelism gives each GPU whole
experts, ep x fewer of them, and splits each over the tp / ep GPUs that share it: the bytes are the same.
Pipeline stages hold consecutive layers, the last ones one more (`distributed.utils.get_pp_indices`).
"""

from __future__ import annotations

from toolkit.profile.memory.shapes import Shape


def weight_bytes(shape: Shape, tp: int, pp: int = 1) -> int:
    """Bytes on the GPU that holds most.

    Args:
        shape: of the checkpoint.
        tp: tensor parallel size; expert parallelism within it changes nothing.
        pp: pipeline parallel size.
    """
    table = 0.0 if shape.is_drafter else shape.vocabulary * shape.hidden * shape.value_bytes / tp
    stages = []
    first = 0
    for stage, count in enumerate(stage_layers(shape.layers, pp)):
        layers = sum(layer_bytes(shape, layer, tp) for layer in range(first, first + count))
        head = stage == pp - 1 and not (shape.tied and pp == 1)
        stages.append(layers + table * ((stage == 0) + head))
        first += count
    return round(max(stages) + shape.other_bytes + _context_projection(shape))


def stage_layers(layers: int, pp: int) -> list[int]:
    """How many layers each pipeline stage holds; the remainder goes to the last stages."""
    base, more = divmod(layers, pp)
    return [base + (stage >= pp - more) for stage in range(pp)]


def layer_bytes(shape: Shape, layer: int, tp: int) -> float:
    """Bytes of one layer on one GPU; norms are left out, they are kilobytes."""
    return _attention(shape, tp) + _mlp(shape, layer, tp)


def _attention(shape: Shape, tp: int) -> float:
    if shape.attention == "MHA":
        values = shape.hidden * shape.head_dim
        # Fewer K/V heads than GPUs: each has a copy of one.
        split = 2 * shape.heads / tp + 2 * max(shape.kv_heads / tp, 1)
        return values * split * shape.value_bytes
    query = shape.nope_dim + shape.rope_dim
    whole = shape.hidden * (shape.q_rank + shape.kv_rank + shape.rope_dim)
    up = shape.kv_rank * (shape.nope_dim + shape.v_dim)
    # SGLang keeps w_kc and w_vc, copies of kv_b_proj for the absorbed form, beside it.
    a_head = (shape.q_rank or shape.hidden) * query + 2 * up + shape.v_dim * shape.hidden
    return (whole + a_head * shape.heads / tp) * shape.value_bytes


def _mlp(shape: Shape, layer: int, tp: int) -> float:
    if layer < shape.dense_layers or not shape.experts:
        return 3 * shape.hidden * shape.intermediate * shape.value_bytes / tp
    expert = 3 * shape.hidden * shape.expert_intermediate
    routed = shape.experts * expert * shape.expert_bytes / tp
    shared = shape.shared_experts * expert * shape.value_bytes / tp
    return routed + shared + shape.hidden * shape.experts * shape.value_bytes


def _context_projection(shape: Shape) -> float:
    """A drafter's projection of the captured hidden states, whole on each GPU."""
    return len(shape.captured_layers) * shape.hidden * shape.hidden * shape.value_bytes
