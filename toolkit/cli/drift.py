"""drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import fleet
from toolkit.cli.options import Inventories, Json, Limit, Overlays, ServiceName, Sets
from toolkit.cli.output import answer, emit, say, table
from toolkit.errors import EXIT_DIFFERENT, ConfigError

if TYPE_CHECKING:
    from toolkit.inventory.host import Host
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

        resolved = None if deployed else _profile(_only(name), overlays, sets)
        found = look({"service": name, "profile": None if resolved is None else resolved.data})
        if as_json:
            emit(found)
        else:
            _show(_only(name), found)
        raise typer.Exit(EXIT_DIFFERENT if found else 0)
    listing = fleet.begin_listing(where)
    service = fleet.service_of(name, where, listing)
    resolved = None if deployed else _profile(service, overlays, sets)
    _on_hosts(service, resolved, where, listing, as_json=as_json)


def _on_hosts(
    name: str,
    resolved: ResolvedProfile | None,
    where: fleet.Where,
    listing: Callable[[], list[Host]],
    *,
    as_json: bool,
) -> None:
    from toolkit.fleet.results import to_json, worst

    wanted = None if resolved is None else resolved.data
    found = fleet.look(name, "drift", {"profile": wanted}, where, found=listing)
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


def _profile(name: str, overlays: Overlays, sets: Sets) -> ResolvedProfile | None:
    """The profile of today; None, said, where its file is gone."""
    from toolkit.profile.loading import load_profile

    try:
        return load_profile(name, overlays=overlays or (), sets=sets or ())
    except ConfigError as error:
        if overlays or sets or any(problem.line is not None for problem in error.problems):
            raise
        say(f"no profile {name!r} is found here: comparing with what was deployed alone")
        return None


def _show(title: str, found: list[dict[str, Any]]) -> None:
    if not found:
        answer(f"{title}: as it was deployed")
        return
    answer(f"{title}: {len(found)} {'drift' if len(found) == 1 else 'drifts'}")
    rows = table("what", "where", "found", "next", whole=("what",))
    for item in found:
        rows.add_row(item["kind"], item["subject"], item["found"], item["fix"])
    answer(rows)
