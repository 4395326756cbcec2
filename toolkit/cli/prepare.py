"""hosts prepare."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import (
    IgnoredChecks,
    Inventories,
    Json,
    Limit,
    Overlays,
    ProfileName,
    Sets,
    Verbose,
    Yes,
)
from toolkit.cli.output import answer, confirm, emit, require_yes, say
from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.fleet.results import HostResult
    from toolkit.inventory.host import Host


def prepare(
    name: ProfileName,
    overlays: Overlays = None,
    sets: Sets = None,
    inventory: Inventories = None,
    limit: Limit = None,
    allow_reboot: Annotated[
        bool,
        typer.Option(
            "--allow-reboot",
            help="Reboot hosts that need it, drained and one after the other, and replace drivers.",
        ),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only show what would be done.")] = False,
    ignored: IgnoredChecks = None,
    yes: Yes = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Install a profile's NVIDIA driver and boot settings on its hosts; exit 7 if a reboot is left."""
    from toolkit.cli.board import Board
    from toolkit.doctor.catalogue import require_known
    from toolkit.fleet.gpu_hosts import examine, prepare_in_turn, preview
    from toolkit.inventory.host import hosts_with
    from toolkit.inventory.load import load_hosts
    from toolkit.profile.loading import load_profile
    from toolkit.provision.gpu_host import require_gpu_host

    if not inventory:
        raise ConfigError("name an inventory", hint="add -i inventory.yaml")
    require_known(ignored or ())
    resolved = load_profile(name, overlays=overlays or (), sets=sets or ())
    settings = {"gpu_host": require_gpu_host(resolved.profile)}
    if not check:
        require_yes(yes=yes, as_json=as_json)
    hosts = hosts_with(load_hosts(inventory, limit=limit), resolved.profile.name, limit=limit)
    names = [host.name for host in hosts]
    planned = preview(settings, inventory, names)
    _show(planned, allow_reboot=allow_reboot, tell=answer if check and not as_json else say)
    words = ["hosts", "prepare", name]
    words += [word for path in overlays or () for word in ("-f", str(path))]
    words += [word for text in sets or () for word in ("--set", text)]
    words += [word for check_name in ignored or () for word in ("--ignore-check", check_name)]
    again = partial(_again, shlex.join(words), {host.name: host for host in hosts})
    todo = [item.host for item in planned if item.ok and (item.value["planned"] or item.value["changes"])]
    if check or not todo or any(not item.ok for item in planned):
        _end(planned, again, as_json=as_json)
        return
    _confirm(todo, yes=yes)
    look = partial(examine, resolved.profile, {host.name: host for host in hosts}, ignored=ignored or ())
    with Board(todo, verbose=verbose) as board:
        done = prepare_in_turn(settings, inventory, todo, board.tell, allow_reboot=allow_reboot, look=look)
    results = {item.host: item for item in (*planned, *done)}
    _end(list(results.values()), again, as_json=as_json)


def _again(words: str, hosts: Mapping[str, Host], name: str) -> str:
    """The command that does the rest on a host."""
    from toolkit.inventory.commands import command

    return command([hosts[name]], f"{words} --allow-reboot")


def _show(planned: Sequence[HostResult], *, allow_reboot: bool, tell: Any) -> None:
    for item in planned:
        if item.value is None:
            continue
        lines, changes = item.value["planned"], item.value["changes"]
        if not lines and not changes:
            tell(f"{item.host}: nothing to do")
        for line in lines:
            no = " (not without --allow-reboot)" if line.startswith("reboot: ") and not allow_reboot else ""
            tell(f"{item.host}: {line}{no}")
        for change in changes:
            tell(f"{item.host}: {change[:1].lower()}{change[1:]}")


def _confirm(hosts: Sequence[str], *, yes: bool) -> None:
    if yes:
        return
    what = f"prepare {', '.join(hosts)}"
    if not sys.stdin.isatty():
        raise ConfigError(f"this would {what}", hint="add --yes")
    confirm(f"{what}?")


def _end(results: Sequence[HostResult], again: Callable[[str], str], *, as_json: bool) -> None:
    from toolkit.cli.fleet import show_errors
    from toolkit.fleet.results import to_json, worst

    if as_json:
        emit(to_json(results))
    show_errors(results)
    for item in results:
        if item.skipped:
            say(f"{item.host}: {item.skipped}")
        elif item.value is not None and "pending" in item.value:
            for line in item.value["pending"]:
                say(f"{item.host}: pending: {line}")
            if item.value["pending"]:
                say(f"  next: {again(item.host)}")
            else:
                say(f"{item.host}: ready")
    if code := worst(results):
        raise typer.Exit(code)
