"""drift."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import fleet
from toolkit.cli.options import Inventories, Json, Limit, Overlays, ServiceName, Sets
from toolkit.cli.output import answer, emit, say, table
from toolkit.errors import EXIT_DIFFERENT, ConfigError

if TYPE_CHECKING:
    from toolkit.inventory.host import Host
    from toolkit.profile.given import Given
    from toolkit.profile.loading import ResolvedProfile


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("drift")(drift)


def drift(
    name: ServiceName = None,
    overlays: Overlays = None,
    sets: Sets = None,
    deployed: Annotated[
        bool,
        typer.Option("--deployed", help="Compare with what was deployed, not with the profile of today."),
    ] = False,
    inventory: Inventories = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Show where a host differs from its release, and the release from the profile; exit 7 if it does."""
    where = fleet.where(inventory, limit)
    if where is None:
        from toolkit.hostside.operations import drift as look
        from toolkit.hostside.operations import given
        from toolkit.profile.given import Given

        resolved = None
        if not deployed:
            deploy = Given.from_json(given({"service": name}))
            resolved = _profile(_only(name), overlays, sets, deploy)
        found = look({"service": name, **_args(resolved)})
        if as_json:
            emit(found)
        else:
            _show(_only(name), found)
        raise typer.Exit(EXIT_DIFFERENT if found else 0)
    listing = fleet.begin_listing(where)
    service = fleet.service_of(name, where, listing)
    wanted = None if deployed else _Wanted(service, overlays, sets)
    _on_hosts(service, wanted, where, listing, as_json=as_json)


class _Wanted:
    """What each host is held against: with what is given here, else as its release was deployed."""

    def __init__(self, name: str, overlays: Overlays, sets: Sets) -> None:
        self._name, self._overlays, self._sets = name, overlays, sets
        self._alone = threading.Lock()
        self._known: dict[Given | None, ResolvedProfile | None] = {}
        if overlays or sets:  # what is wrong with them is told before any host is asked
            self._known[None] = _profile(name, overlays, sets, None)

    def args(self, call: Callable[..., Any]) -> dict[str, Any]:
        """What a host is asked, which is reached by `call`."""
        from toolkit.profile.given import Given

        deploy = None
        if not (self._overlays or self._sets):
            deploy = Given.from_json(call("given", {"service": self._name}))
        with self._alone:
            if deploy not in self._known:
                self._known[deploy] = _profile(self._name, None, None, deploy)
            resolved = self._known[deploy]
        return _args(resolved)


def _args(resolved: ResolvedProfile | None) -> dict[str, Any]:
    if resolved is None:
        return {"profile": None}
    return {"profile": resolved.data, "given": resolved.given.to_json()}


def _on_hosts(
    name: str,
    wanted: _Wanted | None,
    where: fleet.Where,
    listing: Callable[[], list[Host]],
    *,
    as_json: bool,
) -> None:
    from toolkit.fleet.results import to_json, worst

    args = {"profile": None} if wanted is None else wanted.args
    found = fleet.look(name, "drift", args, where, found=listing)
    results = [replace(item, code=EXIT_DIFFERENT) if item.value else item for item in found]
    if as_json:
        emit(to_json(results))
    else:
        for result in results:
            if result.value is not None:
                _show(f"{result.host}: {name}", result.value)
    fleet.show_errors(results)
    raise typer.Exit(worst(results))


def _only(name: str | None) -> str:
    from toolkit.release.locate import find_service

    return find_service(name).name


def _is_of(file: str, name: str) -> bool:
    """Whether a file, named as it was where the deploy was given, is here, too, and of that service."""
    from toolkit.profile.loading import load_profile

    try:
        return Path(file).is_file() and load_profile(file).profile.name == name
    except ConfigError:
        return True  # what is wrong with it is told by whoever loads it
    except OSError:
        return False  # a name that no file can have: the record was damaged


def _loads(file: str) -> bool:
    """Whether a profile is well by itself, so that what is laid on it is what is wrong."""
    from toolkit.profile.loading import load_profile

    try:
        load_profile(file)
    except ConfigError:
        return False
    return True


def _profile(name: str, overlays: Overlays, sets: Sets, deploy: Given | None) -> ResolvedProfile | None:
    """The profile of today; None, said, where one of its files is gone, or no `--set` of the deploy fits it.

    Args:
        name: the service.
        overlays: as given here.
        sets: likewise.
        deploy: what the release was deployed with, which counts where nothing is given here.
    """
    from toolkit.profile.loading import load_profile

    file, words, asked = name, "", bool(overlays or sets)
    if deploy is not None and _is_of(deploy.profile, name):
        file = deploy.profile
    if deploy is not None and not asked:
        overlays, sets = [Path(item) for item in deploy.overlays], list(deploy.sets)
        words = shlex.join(deploy.options)
    try:
        resolved = load_profile(file, overlays=overlays or (), sets=sets or ())
    except ConfigError as error:
        if asked or any(problem.line is not None for problem in error.problems):
            raise
        why = error.message.replace("\n", "; ") if words and _loads(file) else ""
        found = f"no profile {name!r}{f' with {words}' if words else ''} is found here"
        say(f"{found}{f' ({why})' if why else ''}: comparing with what was deployed alone")
        return None
    if words:
        say(f"{name}: the profile with {words}, as its release was deployed")
    return resolved


def _show(title: str, found: list[dict[str, Any]]) -> None:
    if not found:
        answer(f"{title}: as it was deployed")
        return
    answer(f"{title}: {len(found)} {'drift' if len(found) == 1 else 'drifts'}")
    rows = table("what", "where", "found", "next", whole=("what",))
    for item in found:
        rows.add_row(item["kind"], item["subject"], item["found"], item["fix"])
    answer(rows)
