"""doctor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli import fleet
from toolkit.cli.options import (
    IgnoredChecks,
    Inventories,
    Json,
    Limit,
    Overlays,
    Parallel,
    ServiceName,
    Sets,
    Yes,
)
from toolkit.cli.output import answer, confirm, emit, require_yes, say, table
from toolkit.errors import ConfigError, ToolkitError

if TYPE_CHECKING:
    from toolkit.inventory.host import Host
    from toolkit.profile.loading import ResolvedProfile
    from toolkit.profile.schema import Profile

HERE = "this machine"


@dataclass(frozen=True, slots=True)
class Manner:
    """How is looked.

    Attributes:
        ignored: names of checks whose failures do not count.
        load: whether links and GPUs are loaded.
        disruptive: those in use, too.
        yes: whether nobody is asked.
        as_json: whether the answer is JSON.
    """

    ignored: Sequence[str]
    load: bool
    disruptive: bool
    yes: bool
    as_json: bool


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor")(doctor)


def doctor(
    name: ServiceName = None,
    overlays: Overlays = None,
    sets: Sets = None,
    inventory: Inventories = None,
    limit: Limit = None,
    parallel: Parallel = 8,
    ignored: IgnoredChecks = None,
    load: Annotated[
        bool,
        typer.Option(
            "--load",
            help="Also measure copies over PCIe and all-reduces, on GPUs that nobody uses.",
        ),
    ] = False,
    disruptive: Annotated[
        bool,
        typer.Option(
            "--disruptive", help="With --load: also on GPUs that are in use, the service's own included."
        ),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Tell what is wrong with this machine or with hosts for a profile; exit 1 if something fails."""
    where = fleet.where(inventory, limit, parallel=parallel)
    from toolkit.doctor.catalogue import require_known

    require_known(ignored or ())
    if disruptive and not load:
        raise ConfigError("--disruptive goes with --load", hint="add --load")
    if disruptive:
        require_yes(yes=yes, as_json=as_json)
    manner = Manner(ignored or (), load, disruptive, yes, as_json)
    if where is not None:
        _on_hosts(name, overlays, sets, where, manner)
        return
    from toolkit.doctor.ask import report_here

    profile = _here(name, overlays, sets).profile
    if disruptive:
        first = report_here(_examination(profile, manner, look=True))
        _confirm({HERE: [first.to_json()]}, manner)
    report = report_here(_examination(profile, manner))
    if as_json:
        emit(report.to_json())
    else:
        show_report(report.to_json(), HERE)
    raise typer.Exit(report.exit_code)


def _examination(profile: Profile, manner: Manner, *, look: bool = False) -> dict[str, Any]:
    """What a host is asked; with `look` only who is on its GPUs."""
    from toolkit.doctor.request import examination, load_request

    load = load_request(profile, disruptive=manner.disruptive, look=look) if manner.load else None
    return examination(profile, weights=not look, ignored=manner.ignored, load=load)


def _confirm(reports: Mapping[str, Sequence[Mapping[str, Any]]], manner: Manner) -> None:
    """Say whom a load disturbs, and ask.

    Raises:
        ConfigError: there is nobody to ask.
        Exit: the answer is no.
    """
    disturbed = [
        f"{host}: GPU {gpu}, in use by {by}"
        for host, found in reports.items()
        for report in found
        for gpu, by in ((report["load"] or {}).get("busy") or {}).items()
    ]
    if not disturbed:
        return
    say("this takes time and some memory of GPUs that are in use, for a minute or two:")
    for line in disturbed:
        say(f"  {line}")
    if manner.yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("this would disturb what runs there", hint="add --yes")
    confirm("go on?")


def _here(name: str | None, overlays: Overlays, sets: Sets) -> ResolvedProfile:
    from toolkit.profile.loading import load_profile
    from toolkit.release.locate import deployed_services

    if name is None:
        names = [service.name for service in deployed_services()]
        if len(names) != 1:
            said = f"several are deployed here: {', '.join(names)}" if names else "nothing is deployed here"
            raise ConfigError(f"name a profile: {said}", hint="ddtoolkit profiles list shows them")
        name = names[0]
    return load_profile(name, overlays=overlays or (), sets=sets or ())


def _on_hosts(name: str | None, overlays: Overlays, sets: Sets, where: fleet.Where, manner: Manner) -> None:
    listed = fleet.begin_listing(where)
    from toolkit.doctor.ask import report_of
    from toolkit.fleet.many import at_once
    from toolkit.fleet.results import to_json
    from toolkit.profile.loading import load_profile

    known = {} if name is None else {name: load_profile(name, overlays=overlays or (), sets=sets or ())}
    hosts, wanted = _profiles_of(listed(), name, where)
    for other in {item for names in wanted.values() for item in names} - known.keys():
        known[other] = load_profile(other, overlays=overlays or (), sets=sets or ())

    def look(host: str, *, only: bool = False) -> list[dict[str, Any]]:
        asked = [_examination(known[item].profile, manner, look=only) for item in wanted[host]]
        return [report_of(hosts[host], item).to_json() for item in asked]

    if manner.disruptive:
        first = at_once(list(hosts), partial(look, only=True), limit=where.parallel)
        _confirm({item.host: item.value for item in first if item.value is not None}, manner)
    results = at_once(list(hosts), look, limit=where.parallel, grade=_grade)
    if manner.as_json:
        emit(to_json(results))
    else:
        for result in results:
            for report in result.value or ():
                show_report(report, result.host)
    fleet.finish_looking(results)


def _profiles_of(
    hosts: Sequence[Host], name: str | None, where: fleet.Where
) -> tuple[dict[str, Host], dict[str, Sequence[str]]]:
    """The hosts to look at, and for which profiles each; a profile's file may be named instead of it."""
    from toolkit.inventory.host import hosts_with

    if name is None:
        found = [host for host in hosts if host.profiles]
        if not found:
            raise ConfigError("no host of the inventory lists any profile in ddtoolkit_profiles")
        return {host.name: host for host in found}, {host.name: host.profiles for host in found}
    carrying = hosts_with(hosts, name, limit=where.limit)
    return {host.name: host for host in carrying}, {host.name: (name,) for host in carrying}


def _grade(reports: list[dict[str, Any]]) -> int:
    return ToolkitError.exit_code if any(not report["ok"] for report in reports) else 0


def show_report(report: Mapping[str, Any], where: str) -> None:
    """Print what was found: failures and warnings with their fixes, then the rest."""
    counts = report["counts"]
    numbers = ", ".join(
        f"{counts[level]} {level}" for level in ("fail", "warn", "pass", "skip") if counts[level]
    )
    answer(f"{report['profile']} on {where}: {numbers}")
    rows = table("", "check", "seen", "expected", "fix", whole=("", "check"))
    for level in ("fail", "warn", "pass"):
        for item in report["findings"]:
            if item["level"] == level:
                shown = "ignored" if level == "fail" and item["check"] in report["ignored"] else level
                expected = item["expected"] if level != "pass" else ""
                rows.add_row(shown, item["check"], item["seen"], expected, item["fix"])
    answer(rows)
    reasons: dict[str, list[str]] = {}
    for item in report["findings"]:
        if item["level"] == "skip":
            reasons.setdefault(item["seen"], []).append(item["check"])
    for reason, checks in reasons.items():
        say(f"  not looked at, since {reason}: {', '.join(checks)}")
