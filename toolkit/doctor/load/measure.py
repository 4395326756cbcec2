"""Load on a host's GPUs: on those that nobody uses, unless it is allowed to disturb."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.build.bootstrap import REMEMBERED
from toolkit.doctor.facts import Facts
from toolkit.doctor.load import record
from toolkit.doctor.load.confine import Way
from toolkit.doctor.load.run import measure as run
from toolkit.doctor.load_result import Load, Run, read_copies, read_reduced
from toolkit.doctor.parse.smi import Gpu
from toolkit.doctor.sandbox import user_for
from toolkit.doctor.users import users_of
from toolkit.doctor.wanted import Wanted
from toolkit.errors import ToolkitError
from toolkit.layout import TOOL, Layout
from toolkit.release.lock import Lock

_NO_TORCH = "deploy the profile, or run playbooks/build.yml, which bring it; or set host.python"


def load_on(request: Mapping[str, Any], facts: Facts, wanted: Wanted) -> Load:
    """Measure on this host what a profile uses.

    Args:
        request: as `toolkit.doctor.request.load_request` makes it.
        facts: of this host.
        wanted: what the profile wants.

    Returns:
        What was measured, or why nothing was; with `look` only who is on the GPUs.
    """
    used = facts.used(wanted)
    busy = {gpu.index: by for gpu in used if (by := users_of(gpu, facts))}
    if request.get("look"):
        return Load(gpus=tuple(gpu.index for gpu in used), busy=busy)
    chosen = [gpu for gpu in used if not gpu.mig and (request["disruptive"] or gpu.index not in busy)]
    if not chosen:
        return Load(busy=busy)
    pythons = [str(Path(path).expanduser()) for path in request["pythons"] or _own()]
    python = next((path for path in pythons if os.path.isfile(path)), None)  # noqa: PTH113  never raises
    if python is None:
        return Load(why=f"there is no {' or '.join(pythons)}", fix=_NO_TORCH, busy=busy)
    try:
        with _alone(request):
            return _measured(request, chosen, used, busy, _way(request, python))
    except ToolkitError as error:
        return Load(
            why=error.message, fix=error.hint or "run the doctor again when that has ended", busy=busy
        )


def _measured(
    request: Mapping[str, Any], chosen: Sequence[Gpu], used: Sequence[Gpu], busy: Mapping[int, str], way: Way
) -> Load:
    """Copies, then all-reduces, unless something of the copies cannot be killed."""
    told = [{"index": gpu.index, "uuid": gpu.uuid, "address": gpu.address} for gpu in chosen]
    groups, whole = groups_of([gpu.index for gpu in chosen], [gpu.index for gpu in used], request["group"])
    uuids = {gpu.index: gpu.uuid for gpu in chosen}
    load = Load(gpus=tuple(uuids), busy=busy, groups=groups, whole=whole, device=request["device"])
    load = measured(load, request, told, way)
    if load.beside or not record.figures(load):
        return load
    path = Path(request["record"])
    earlier = record.best_of(path, uuids)
    problem = record.remember(path, uuids, load)
    return replace(load, earlier=earlier, record=str(path), problem=problem)


def measured(load: Load, request: Mapping[str, Any], gpus: Sequence[dict[str, Any]], way: Way) -> Load:
    """A `Load` with what was measured.

    Args:
        load: which GPUs, and in what groups.
        request: `device`, `bytes`, `seconds`, `sizes` and `iterations` of a measurement.
        gpus: `index`, `uuid` and `address` of each.
        way: where it runs.
    """
    asked = {**request, "gpus": list(gpus)}
    addresses = {str(gpu["address"]): int(gpu["index"]) for gpu in gpus}
    lines, copying = run("copies", asked, way)
    load = replace(load, copying=copying, **read_copies(lines, addresses))
    if copying.left:
        return replace(load, reducing=Run("skipped", said="a process of the copies cannot be killed"))
    if not load.groups:
        return replace(load, reducing=Run("skipped", said="one GPU has nothing to reduce with"))
    places = {int(gpu["index"]): place for place, gpu in enumerate(gpus)}
    positions = [[places[index] for index in group] for group in load.groups]
    lines, reducing = run("all_reduce", {**asked, "groups": positions}, way)
    found = read_reduced(lines)
    found["software"] = {**load.software, **found["software"]}
    return replace(load, reducing=reducing, **found)


def groups_of(
    chosen: Sequence[int], used: Sequence[int], size: int
) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """GPUs that reduce together, and whether these are the profile's own groups.

    Args:
        chosen: the GPUs that may be used.
        used: all of the profile, in their order.
        size: of a group, its tensor parallel size.
    """
    wide = size if size > 1 else len(used)
    all_groups = [tuple(used[first : first + wide]) for first in range(0, len(used), wide)]
    whole = tuple(group for group in all_groups if len(group) > 1 and set(group) <= set(chosen))
    if whole or len(chosen) < 2:
        return whole, len(whole) == len(all_groups)
    return (tuple(chosen),), False


def _own() -> list[str]:
    """The toolkit's own interpreter, which serves a profile that names none under the process manager."""
    remembered = Path(TOOL, REMEMBERED)
    with contextlib.suppress(OSError):
        return [remembered.read_text(encoding="utf-8").strip(), sys.executable]
    return [sys.executable]


def _way(request: Mapping[str, Any], python: str) -> Way:
    user = None if request["user"] is None else user_for(request["user"])
    return Way(
        python, request["environment"], request["properties"], user, request["limit"], request["silence"]
    )


@contextlib.contextmanager
def _alone(request: Mapping[str, Any]) -> Iterator[None]:
    """Hold the service's lock, where it was deployed, so that no change of it is measured or judged.

    Raises:
        LockedError: a change is under way.
    """
    root = request["root"]
    paths = Layout(None if root is None else Path(root)).service(request["service"])
    if not os.path.isdir(paths.base):  # noqa: PTH112  never raises
        yield
        return
    with Lock(paths, request["service"]).hold("doctor --load"):
        yield
