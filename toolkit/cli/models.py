"""models list, add, rm, verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import Inventories, Json, Limit, Overlays, Parallel, Seed, Sets, Verbose, Yes
from toolkit.cli.output import answer, confirm, console, emit, require_yes, say, table
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult
    from toolkit.inventory.host import Host

HERE = "this machine"
models_app = typer.Typer(
    help="Model checkpoints on hosts: fetched, checked, removed.", no_args_is_help=True, rich_markup_mode=None
)
Root = Annotated[
    Path | None,
    typer.Option("--root", metavar="DIR", help="Folder that all lies below; unset: the system's places."),
]
ModelName = Annotated[str, typer.Argument(metavar="NAME@REVISION", help="As `models list` shows it.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(models_app, name="models")


@models_app.command("list")
def list_models(
    root: Root = None,
    inventory: Inventories = None,
    limit: Limit = None,
    parallel: Parallel = 8,
    as_json: Json = False,
) -> None:
    """Checkpoints on this machine or on hosts: size, state, and which releases need them."""
    from toolkit.weights.pace import size_words

    hosts = _hosts(inventory, limit)
    results = _ask_all(hosts, "list", _rooted(root), parallel)
    if as_json:
        _emit(results, inventory)
    else:
        shown = table("host", "model", "size", "state", "needed by", whole=("host", "model"))
        for result in results:
            for item in (result.value or {}).get("models", ()):
                state = "; ".join(item["damage"]) or "complete"
                users = ", ".join(item["used_by"]) or "nothing"
                shown.add_row(result.host, item["model"], size_words(item["bytes"]), state, users)
        answer(shown)
        for result in results:
            if result.value is not None:
                say(f"{result.host}: {size_words(result.value['free'])} are free")
    _finish(results)


@models_app.command("add")
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE|PROFILE",
            help="hf://OWNER/REPOSITORY@REVISION, https://HOST/NAME/, peer://HOST/NAME@REVISION; a profile.",
        ),
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", help="Revision, where the source does not name it.")
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    root: Root = None,
    hub: Annotated[str | None, typer.Option("--hub", metavar="URL", help="Hub of hf:// sources.")] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="SIZE", help="Most bytes a second, such as 100MB.")
    ] = None,
    files: Annotated[int, typer.Option("--files", min=1, max=64, help="Files fetched at the same time.")] = 4,
    seed: Seed = None,
    inventory: Inventories = None,
    limit: Limit = None,
    parallel: Parallel = 8,
    yes: Yes = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Fetch a checkpoint, or all that a profile asks for; of many hosts one does, the others from that one.

    A transfer that broke goes on where it was. Nothing that serves is touched.
    """
    from toolkit.cli.board import Board
    from toolkit.fleet.fanout import Fanout, Spread, known_hosts

    require_yes(yes=yes, as_json=as_json)
    requests, profile = _requests(source, revision, overlays, sets)
    given = {"endpoint": hub or _hub_here(), "rate": _size(rate), "parallel": files}
    if profile is None:
        requests = [{**item, **_rooted(root), **given} for item in requests]
    hosts = {host.name: host for host in _hosts(inventory, limit, profile)}
    if profile is None:
        requests = [_pinned(item, next(iter(hosts.values()))) for item in requests]
    spread = Spread(parallel, seed)
    known = known_hosts(hosts, requests, spread, inventory or ())
    plans = _ask_all(list(hosts.values()), "plan", {"requests": requests}, parallel)
    _finish([item for item in plans if item.error is not None])
    lacking = {item.host: [one["folder"] for one in item.value["lacking"]] for item in plans}
    for item in plans:
        _require_space(item)
    with Board(list(hosts), verbose=verbose) as board:
        results = Fanout(lacking, hosts, known, spread, board.tell).bring(requests)
    if as_json:
        _emit(results, inventory)
    for item in plans:
        if not item.value["lacking"]:
            say(f"{item.host}: everything is there already")
    for item in results:
        for folder, value in (item.value or {}).items():
            say(f"{item.host}: {folder} is complete at {value['folder']}")
    _finish(results)


@models_app.command("rm")
def remove(
    model: ModelName,
    force: Annotated[
        bool, typer.Option("--force", help="Also where an earlier release needs it for a rollback.")
    ] = False,
    root: Root = None,
    inventory: Inventories = None,
    limit: Limit = None,
    parallel: Parallel = 8,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a checkpoint that no release needs. Nothing else ever removes one."""
    from toolkit.weights.pace import size_words

    hosts = _hosts(inventory, limit)
    require_yes(yes=yes, as_json=as_json)
    if not yes:
        names = ", ".join(_having(model, _ask_all(hosts, "list", _rooted(root), parallel)))
        if names and not console().is_terminal:
            raise ConfigError(f"{model} would be removed from {names}", hint="add --yes")
        if names:  # else the removal says what there is
            confirm(f"remove {model} from {names}?")
    results = _ask_all(hosts, "rm", {**_rooted(root), "model": model, "force": force}, parallel)
    if as_json:
        _emit(results, inventory)
    for item in results:
        if item.value is not None:
            say(f"{item.host}: {model} is removed, {size_words(item.value['freed'])} are free again")
    _finish(results)


def _having(model: str, looked: Sequence[HostResult]) -> list[str]:
    """Hosts that have a model, or did not answer; how much would be free again there, and who needs it."""
    from toolkit.weights.pace import size_words

    told = [item.host for item in looked if item.value is None]
    for item in looked:
        found = [one for one in (item.value or {}).get("models", ()) if one["model"] == model]
        users = sorted({user for one in found for user in one["used_by"]})
        needed = f", needed by {', '.join(users)}" if users else ""
        if found:
            told.append(f"{item.host} ({size_words(sum(one['bytes'] for one in found))}{needed})")
    return told


@models_app.command("verify")
def verify(
    model: Annotated[
        str | None, typer.Argument(metavar="[NAME@REVISION]", help="One of them; unset: all.")
    ] = None,
    root: Root = None,
    inventory: Inventories = None,
    limit: Limit = None,
    parallel: Parallel = 8,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Read checkpoints whole and compare their SHA-256 with those that they came with; exit 1 if one differs.

    What is corrupt is fetched again by the next deploy.
    """
    hosts = _hosts(inventory, limit)
    results = _ask_all(hosts, "verify", {**_rooted(root), "model": model}, parallel, verbose=verbose)
    if as_json:
        _emit(results, inventory)
    bad = []
    for item in results:
        for name in (item.value or {}).get("checked", ()):
            wrong = item.value["wrong"].get(name)
            bad += [host for host in hosts if wrong and host.name == item.host and host not in bad]
            say(f"{item.host}: {name}: {'; '.join(wrong) if wrong else 'every file is as it came'}")
    if bad:
        from toolkit.inventory.commands import command

        say(f"  next: {command(bad, 'models add PROFILE')} fetches again what is corrupt; so does a deploy")
    _finish(results)
    if bad:
        raise typer.Exit(1)


def _requests(
    source: str, revision: str | None, overlays: Sequence[Path] | None, sets: Sequence[str] | None
) -> tuple[list[dict[str, Any]], str | None]:
    """What hosts are asked for, and the profile that asks for it."""
    from toolkit.profile.source import is_remote
    from toolkit.weights.request import wish_of

    if is_remote(source):
        request = {"source": source, "revision": revision}
        wish_of(request)
        return [request], None
    from toolkit.profile.loading import load_profile
    from toolkit.weights.wanted import requests

    profile = load_profile(source, overlays=overlays or (), sets=sets or ()).profile
    found = requests(profile)
    if not found:
        raise ConfigError(
            f"profile {profile.name} names no checkpoint that is fetched", hint="model.target.source"
        )
    return found, profile.name


def _pinned(request: dict[str, Any], host: Host) -> dict[str, Any]:
    """The same at the commit that a branch or tag stands for, which the first host asks the hub for."""
    from toolkit.fleet.checkpoints import ask
    from toolkit.weights.request import wish_of

    source = wish_of(request).origin.source
    if source.pinned:
        return request
    commit = ask(host, "resolve", request, lambda _: None)["commit"]
    say(f"{source} is hf://{source.location}@{commit}: that is what a profile names")
    return {**request, "source": f"hf://{source.location}", "revision": commit}


def _hub_here() -> str | None:
    """The hub that this machine's environment names, as the hub's own tools read it."""
    import os

    return os.environ.get("HF_ENDPOINT") or None


def _size(text: str | None) -> int | None:
    from toolkit.profile.units import parse_size

    if text is None:
        return None
    try:
        found = int(parse_size(text))
    except ValueError as error:
        raise ConfigError(f"--rate {text!r} {error}") from None
    if found < 1024:
        raise ConfigError(f"--rate {text!r} is below 1KiB a second")
    return found


def _rooted(root: Path | None) -> dict[str, Any]:
    return {"root": None if root is None else str(root)}


def _hosts(inventory: Sequence[Path] | None, limit: str | None, profile: str | None = None) -> list[Host]:
    """The hosts that were asked for, or this machine."""
    from toolkit.cli import fleet
    from toolkit.inventory.host import Host, hosts_with

    where = fleet.where(inventory, limit)
    if where is None:
        return [Host(HERE, {"ansible_connection": "local"})]
    from toolkit.inventory.load import load_hosts

    hosts = load_hosts(where.inventory, limit=limit)
    if profile is not None:
        return hosts_with(hosts, profile, limit=limit)
    if not hosts:
        raise ConfigError("no host of the inventory matches", hint="ddtoolkit hosts list with the same -i")
    return hosts


def _ask_all(
    hosts: Sequence[Host], verb: str, request: Mapping[str, Any], limit: int, *, verbose: bool = False
) -> list[HostResult]:
    from toolkit.fleet.checkpoints import ask
    from toolkit.fleet.many import at_once

    by_name = {host.name: host for host in hosts}

    def one(name: str) -> dict[str, Any]:
        def tell(value: dict[str, Any]) -> None:
            if verbose and "line" in value:
                say(f"{name}: {value['line']}")

        return ask(by_name[name], verb, request, tell)

    return at_once(list(by_name), one, limit=limit)


def _require_space(item: HostResult) -> None:
    from toolkit.errors import ToolkitError

    if item.value["short"] is not None:
        hint = "free some space, or remove a checkpoint: ddtoolkit models list; ddtoolkit models rm"
        raise ToolkitError(f"{item.host}: {item.value['short']}", hint=hint)


def _emit(results: Sequence[HostResult], inventory: Sequence[Path] | None) -> None:
    """The data: by host, or of this machine alone."""
    from toolkit.fleet.results import to_json

    if inventory:
        emit(to_json(results))
    elif results and results[0].value is not None:
        emit(results[0].value)


def _finish(results: Sequence[HostResult]) -> None:
    from toolkit.cli.fleet import finish_looking

    for item in results:
        if item.skipped:
            say(f"{item.host}: {item.skipped}")
    finish_looking(results)
