"""The same model spread in other ways over the same GPUs, with the sum of memory for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.profile.memory.estimate import GIB, Estimate, estimate, named_shape
from toolkit.profile.schema import Parallelism, Profile

PLAIN = "no speculation"


def layouts(profile: Profile) -> list[tuple[str, Estimate]]:
    """The profile's own way first, then tensor, pipeline and expert parallelism over as many GPUs.

    Pipelines have no speculation, as they cannot. Empty where the profile's own way cannot be judged, the
    memory of a GPU or a shape being unknown.
    """
    own = estimate(profile)
    if own is None:
        return []
    found = [(title(profile.parallelism), own)]
    for spread in dict.fromkeys(_others(profile)):
        if spread == profile.parallelism:
            continue
        piped = spread.pp > 1 and profile.speculative.algorithm != "NONE"
        judged = _plain(profile) if piped else profile
        if (sum_ := estimate(judged, spread)) is not None:
            found.append((title(spread) + (f", {PLAIN}" if piped else ""), sum_))
    return found


def title(spread: Parallelism) -> str:
    """`tp 8 ep 4`: the sizes that are not 1."""
    sizes = (("tp", spread.tp), ("pp", spread.pp), ("ep", spread.ep))
    return " ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one GPU"


def table(found: list[tuple[str, Estimate]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows for people, GiB on one GPU."""
    names = dict.fromkeys(term.name for _, each in found for term in (*each.static, *each.dynamic))
    header = ["GiB on one GPU", *(name for name, _ in found)]
    rows = [[name, *(_of(each, name) for _, each in found)] for name in names]
    rows.append(["weights and least K/V", *(_part(e.static_bytes, e.static_room) for _, e in found)])
    rows.append(["everything else", *(_part(e.dynamic_bytes, e.dynamic_room) for _, e in found)])
    rows.append(["tokens of K/V in all", *(f"{max(0, each.pool_tokens):,}" for _, each in found)])
    rows.append(["fits", *("yes" if each.fits else "no" for _, each in found)])
    return header, rows


def as_json(name: str, each: Estimate) -> dict[str, Any]:
    """The sum as a JSON object; bytes on one GPU."""
    terms = {term.name: {"bytes": term.bytes, "how": term.how} for term in (*each.static, *each.dynamic)}
    return {
        "layout": name,
        "free": each.free,
        "memory_fraction": round(each.fraction, 4),
        "terms": terms,
        "static": each.static_bytes,
        "static_room": each.static_room,
        "dynamic": each.dynamic_bytes,
        "dynamic_room": each.dynamic_room,
        "pool_tokens": each.pool_tokens,
        "fits": each.fits,
    }


def _others(profile: Profile) -> Iterator[Parallelism]:
    count = profile.hardware.count
    target = named_shape(profile.model.target.shape)
    if target is None or count < 1 or target.heads % count:
        return
    yield Parallelism(tp=count)
    if count <= target.layers:
        yield Parallelism(pp=count)
    for ep in (count, count // 2):
        if ep > 1 and target.experts and target.experts % ep == 0:
            yield Parallelism(tp=count, ep=ep)


def _plain(profile: Profile) -> Profile:
    speculative = profile.speculative.model_copy(update={"algorithm": "NONE"})
    return profile.model_copy(update={"speculative": speculative})


def _of(each: Estimate, name: str) -> str:
    terms = (term for term in (*each.static, *each.dynamic) if term.name == name)
    return next((f"{term.bytes / GIB:.1f}" for term in terms), "")


def _part(used: int, room: int) -> str:
    return f"{used / GIB:.1f} of {room / GIB:.1f}"
