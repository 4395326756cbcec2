"""The answers of this host to what it is asked about checkpoints; each ends with an object with `changed`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.files import replace_file
from toolkit.service.detached import may_detach, watch
from toolkit.weights import used
from toolkit.weights.bring import KEPT_FREE, bring, refuse_other
from toolkit.weights.listing import Listing
from toolkit.weights.origins import commit_of
from toolkit.weights.pace import Tell
from toolkit.weights.request import RUN, Wish, layout_in, wish_of
from toolkit.weights.reserve import free_below, shortage, to_come
from toolkit.weights.seeding import seed, unseed
from toolkit.weights.store import PART, alone, damage, read_marker, shortened, status_of
from toolkit.weights.verify import verify

MODULE = "toolkit.weights"

Request = Mapping[str, Any]
Answer = dict[str, Any]


def plan(request: Request, _: Tell) -> Answer:
    """What bringing checkpoints would take: `requests`, all of one profile.

    Returns:
        `lacking`: for each that has to come `folder`, `why`, `bytes` (None where the source cannot be asked),
        `from`, `problem` and `hint`; `short`: the sum that does not fit on the disk, in words, else None.
    """
    wishes = [wish_of({**request, **item}) for item in request["requests"]]
    lacking, parts = [], []
    for wish in {item.folder: item for item in wishes}.values():
        refuse_other(wish.folder, wish.origin.source)
        wrong = damage(wish.folder)
        if not wrong:
            continue
        item: Answer = {"folder": wish.folder.name, "why": shortened(wrong), "bytes": None}
        item |= {"problem": None, "hint": None, "from": str(wish.origin.source)}
        try:
            listing = wish.origin.listing(wish.origin.web())
        except ToolkitError as error:
            item |= {"problem": error.message, "hint": error.hint}
        else:
            item["bytes"] = _to_come(wish, listing)
            parts.append((wish.folder.name, item["bytes"]))
        lacking.append(item)
    short = None
    if parts:
        terms = wishes[0].terms
        parts.append((KEPT_FREE, terms.min_free))
        short = shortage(parts, free_below(terms.models), terms.models)
    return {"changed": False, "lacking": lacking, "short": short}


def _to_come(wish: Wish, listing: Listing) -> int:
    """Bytes that have to come; what is there of it already is not counted."""
    marker = read_marker(wish.folder)
    files = listing.files
    if marker is not None:
        kept = {
            path
            for path, mark in marker.files.items()
            if (status := status_of(wish.folder / path)) and mark.fits(status) and not mark.corrupt
        }
        files = [file for file in files if file.path not in kept]
    return to_come(wish.folder.with_name(wish.folder.name + PART), files)


def add(request: Request, tell: Tell) -> Answer:
    """Bring one checkpoint; root under systemd does it in a unit, which a cut connection leaves alone."""
    wish = wish_of(request)
    if not wish.origin.source.pinned:
        raise ToolkitError(f"{wish.origin.source} moves: name its commit", hint="ask for it with `resolve`")
    if not may_detach():
        return bring(wish.origin, wish.terms, tell)
    state = wish.layout.state
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    asked = RUN / f"ddtoolkit-{wish.unit}.request"
    replace_file(asked, json.dumps(dict(request)).encode())  # for root alone: it may hold a peer's token
    last: Answer = {}

    def passed(value: Answer) -> None:
        if {"changed", "error"} & value.keys():
            last.update(value)
        else:
            tell(value)

    words = ["--in-unit", str(asked)]
    try:
        failed = watch(wish.unit, words, state, passed, module=MODULE, what=f"fetching {wish.folder.name}")
    finally:
        asked.unlink(missing_ok=True)  # a unit that ran already has not read it
    if failed:
        raise ToolkitError(str(last.get("error")), hint=last.get("hint"))
    return last


def add_in_unit(path: Path, tell: Tell) -> Answer:
    """What `add` has a unit do: the request is read from a file, which is removed."""
    request = json.loads(path.read_bytes())
    path.unlink()
    wish = wish_of(request)
    return bring(wish.origin, wish.terms, tell)


def resolve(request: Request, _: Tell) -> Answer:
    """The commit that a repository's branch or tag stands for now."""
    return {"changed": False, "commit": commit_of(wish_of(request).origin)}


def models(request: Request, _: Tell) -> Answer:
    """All checkpoints of this host."""
    layout = layout_in(request)
    return {"changed": False, "models": used.models(layout), "free": free_below(layout.models)}


def remove(request: Request, tell: Tell) -> Answer:
    """Remove a checkpoint."""
    name = str(request["model"])
    freed = used.remove(
        layout_in(request), name, force=bool(request.get("force")), say=lambda text: tell({"line": text})
    )
    return {"changed": True, "model": name, "freed": freed}


def rehash(request: Request, tell: Tell) -> Answer:
    """Hash checkpoints again: one, or all that are complete."""
    layout, name = layout_in(request), request.get("model")
    folders = [used.chosen(layout, str(name))] if name else _complete(request)
    wrong = {}
    for folder in folders:
        tell({"line": f"checking {folder.name}"})
        with alone(layout.models, folder.name, lambda text: tell({"line": text})):
            found = verify(folder, tell) if status_of(folder) else ["it is not complete yet"]
        if found:
            wrong[folder.name] = found
    return {"changed": False, "checked": [folder.name for folder in folders], "wrong": wrong}


def _complete(request: Request) -> list[Path]:
    layout = layout_in(request)
    return [layout.models / item["model"] for item in used.models(layout) if item["complete"]]


VERBS: dict[str, Callable[[Request, Tell], Answer]] = {
    "plan": plan,
    "resolve": resolve,
    "add": add,
    "list": models,
    "rm": remove,
    "verify": rehash,
    "seed": seed,
    "unseed": unseed,
}
