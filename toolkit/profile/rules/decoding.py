"""Rules of speculative decoding and of the models it needs."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.profile.memory.estimate import named_shape
from toolkit.profile.rules.finding import Finding, doubt, error
from toolkit.profile.rules.tables import BACKEND_REASONS, TREE_ARGUMENTS, TREE_BACKENDS
from toolkit.profile.schema import Profile

_ALGORITHM = "speculative.algorithm"


def decoding_rules(profile: Profile) -> Iterator[Finding]:
    """Trees, drafters, parallelism and attention backends."""
    yield from _checkpoints(profile)
    if profile.speculative.algorithm != "NONE":
        yield from _block(profile)
        yield from _speculative_parallelism(profile)
    if profile.speculative.algorithm == "DDTREE":
        yield from _tree(profile)
        if profile.engine.kind == "sglang":
            yield from _verify_backend(profile)
            yield from _cache(profile)


def _block(profile: Profile) -> Iterator[Finding]:
    spec, context = profile.speculative, profile.model.context_length
    if profile.model.drafter is None:
        yield error(
            f"is missing: {spec.algorithm} drafts with a DFlash drafter",
            "model.drafter",
            _ALGORITHM,
            hint="add `drafter: {source: ...}`",
        )
    if context is not None and context <= spec.block_size:
        yield error(
            f"{context} leaves no room for a drafted block of {spec.block_size}",
            "model.context_length",
            "speculative.block_size",
        )


def _tree(profile: Profile) -> Iterator[Finding]:
    spec = profile.speculative
    chain = spec.block_size - 1
    if spec.budget < chain:
        yield error(
            f"{spec.budget} is below block_size - 1 = {chain}: the greedy chain would not fit in the tree",
            "speculative.budget",
            "speculative.block_size",
            _ALGORITHM,
            hint=f"at least {chain}",
        )
    elif spec.budget > chain and (spec.expansion == "chain" or spec.topk_cap == 1):
        why = "expansion is chain" if spec.expansion == "chain" else "topk_cap is 1"
        yield doubt(
            f"a chain has {chain} nodes ({why}); the other {spec.budget - chain} are padding",
            "speculative.budget",
            "speculative.block_size",
            "speculative.topk_cap",
            "speculative.expansion",
        )
    drafter = profile.model.drafter
    if spec.expansion == "transition" and drafter is not None and drafter.shape is not None:
        yield error(
            f"the published drafter {drafter.shape} has no transition table",
            "speculative.expansion",
            "model.drafter.shape",
            hint="best_first",
        )
    if spec.topk_cap > spec.budget:
        yield doubt(
            f"{spec.topk_cap} candidates a slot are more than the {spec.budget} nodes of the tree",
            "speculative.topk_cap",
            "speculative.budget",
        )


def _speculative_parallelism(profile: Profile) -> Iterator[Finding]:
    name = profile.speculative.algorithm
    if profile.parallelism.pp > 1:
        yield error(f"{name} does not run with pipeline parallelism", "parallelism.pp", _ALGORITHM, hint="1")
    if profile.parallelism.dp_attention:
        yield error(
            f"{name} does not run with data-parallel attention", "parallelism.dp_attention", _ALGORITHM
        )


def _verify_backend(profile: Profile) -> Iterator[Finding]:
    backend, key = profile.engine.attention_backend, "engine.attention_backend"
    shape = named_shape(profile.model.target.shape)
    if backend is None or _verifies(backend, None if shape is None else shape.attention):
        return
    able = [name for name in TREE_BACKENDS if _verifies(name, None if shape is None else shape.attention)]
    why = BACKEND_REASONS.get(backend) or f"it takes no tree masks with {shape.attention if shape else 'any'}"
    yield error(
        f"DDTREE cannot verify with {backend}: {why}",
        key,
        "model.target.shape",
        _ALGORITHM,
        hint=" or ".join(able),
    )


def _verifies(backend: str, attention: str | None) -> bool:
    able = TREE_BACKENDS.get(backend, frozenset())
    return bool(able) if attention is None else attention in able


def _cache(profile: Profile) -> Iterator[Finding]:
    """Pages and data types of the K/V that accepted rows are moved in."""
    for key in ("page_size", "kv_cache_dtype"):
        value = getattr(profile.engine, key)
        allowed, reason = TREE_ARGUMENTS["--" + key.replace("_", "-")]
        if value is not None and str(value) not in allowed:
            yield error(
                f"DDTREE does not take {value}: {reason}",
                f"engine.{key}",
                _ALGORITHM,
                hint=" or ".join(allowed),
            )


def _checkpoints(profile: Profile) -> Iterator[Finding]:
    target, drafter = profile.model.target, profile.model.drafter
    for key, checkpoint in (("model.target", target), ("model.drafter", drafter)):
        if checkpoint is None or checkpoint.source != "bundled":
            continue
        if profile.engine.kind != "embedded":
            yield error(
                "the bundled pair is for the embedded engine",
                f"{key}.source",
                "engine.kind",
                hint="name the checkpoint's folder on the host",
            )
        if checkpoint.revision is not None:
            yield error("the bundled pair has no revisions", f"{key}.revision", f"{key}.source")
    embedded = profile.engine.kind == "embedded"
    if embedded and drafter is not None and (drafter.source == "bundled") != (target.source == "bundled"):
        yield error(
            "a drafter belongs to the target that it was trained on; the bundled two go together",
            "model.drafter.source",
            "model.target.source",
        )
    yield from _remote_code(profile)


def _remote_code(profile: Profile) -> Iterator[Finding]:
    key = "model.trust_remote_code"
    if not profile.model.trust_remote_code:
        return
    if profile.engine.kind == "embedded":
        yield error(
            "the embedded engine runs no code of a checkpoint", key, "engine.kind", hint="take it out"
        )
    elif not profile.model.target.pinned:
        yield error(
            "code of a checkpoint runs only from a local folder with a pinned revision",
            key,
            "model.target.revision",
            hint="set model.target.revision",
        )
