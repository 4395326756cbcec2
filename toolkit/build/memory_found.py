"""Checkpoints as they lie on the host, against what the profile says of them; before anything is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.profile.memory.estimate import GIB, estimate, named_shape
from toolkit.profile.memory.shapes import Shape, shape_of
from toolkit.profile.memory.weights import weight_bytes
from toolkit.profile.nodes import format_path
from toolkit.profile.rules.spread import spread_findings
from toolkit.profile.schema import Checkpoint, Profile

_COMPARED = (
    "attention",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "kv_rank",
    "experts",
    "expert_intermediate",
    "vocabulary",
    "block_size",
    "captured_layers",
)
_EXPLAINED = 0.05  # a larger part of the files that config.json does not account for: nothing is said


def check_checkpoints(profile: Profile, on_host: Profile) -> Iterator[str]:
    """Read both config.json and judge spread and memory by them; lines of progress.

    Args:
        profile: as it was written, with the shapes that it names.
        on_host: the same with the folders that the checkpoints lie in.

    Raises:
        ToolkitError: a config.json cannot be read, or is of another model than the shape that is named.
        ConfigError: the checkpoints do not fit the GPUs, or cannot be spread so; with the sum.
    """
    if profile.engine.kind != "sglang":
        return
    target = _found(on_host.model.target, profile.model.target.shape)
    drafter = None
    if profile.speculative.algorithm != "NONE" and on_host.model.drafter is not None:
        asked = profile.model.drafter
        drafter = _found(on_host.model.drafter, None if asked is None else asked.shape)
    unclear = [shape for shape in (target, drafter) if shape is not None and not _explained(shape)]
    for shape in unclear:
        yield (
            f"{shape.name}: {shape.weight_bytes / GIB:.1f} GiB, of which its config.json explains "
            f"{weight_bytes(shape, 1) / GIB:.1f}: memory is not judged"
        )
    if unclear:
        return
    target, drafter = _complete(target), None if drafter is None else _complete(drafter)
    problems = [
        Problem(finding.message, key=format_path(finding.paths[0]), hint=finding.hint)
        for finding in spread_findings(profile, target, drafter)
        if finding.fatal
    ]
    if problems:
        raise ConfigError(problems)
    if (sum_ := estimate(profile, target=target, drafter=drafter)) is not None:
        need = (sum_.static_bytes + sum_.dynamic_bytes) / GIB
        yield f"memory: {need:.1f} of {sum_.free / GIB:.1f} GiB of each GPU by the checkpoints' config.json"


def _found(checkpoint: Checkpoint, named: str | None) -> Shape:
    folder = Path(checkpoint.source).expanduser()
    found, known = shape_of(folder), named_shape(named)
    for key in () if known is None else _COMPARED:
        one, other = getattr(found, key), getattr(known, key)
        if one and one != other:  # what config.json leaves out contradicts nothing
            raise ToolkitError(
                f"{folder / 'config.json'}: {key} is {one}, and {named} has {other}",
                hint="correct the profile's `shape`, or take it out: then the checkpoint's own numbers count",
            )
    return found


def _explained(shape: Shape) -> bool:
    return (
        abs(weight_bytes(shape, 1) - _copies(shape) - shape.weight_bytes) <= _EXPLAINED * shape.weight_bytes
    )


def _complete(shape: Shape) -> Shape:
    """With what config.json does not tell of, such as a vision tower, whole on each GPU."""
    rest = shape.weight_bytes - (weight_bytes(shape, 1) - _copies(shape))
    return replace(shape, other_bytes=max(0, rest))


def _copies(shape: Shape) -> int:
    """MLA's copies of kv_b_proj, which the engine makes and the files do not have."""
    return round(
        shape.layers * shape.heads * shape.kv_rank * (shape.nope_dim + shape.v_dim) * shape.value_bytes
    )
