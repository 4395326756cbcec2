"""doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli import fleet
from toolkit.cli.options import IgnoredChecks, Inventories, Json, Limit, Overlays, Parallel, ServiceName, Sets
from toolkit.cli.output import answer, emit, say, table
from toolkit.errors import ConfigError, ToolkitError

if TYPE_CHECKING:
    from toolkit.inventory.host import Host
    from toolkit.profile.loading import ResolvedProfile


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
    as_json: Json = False,
) -> None:
    """Tell what is wrong with this machine or with hosts for a profile; exit 1 if something fails."""
    where = fleet.where(inventory, limit, parallel=parallel)
    from toolkit.doctor.catalogue import require_known

    require_known(ignored or ())
    if where is not None:
        _on_hosts(name, overlays, sets, where, ignored=ignored or [], as_json=as_json)
        return
    from toolkit.doctor.ask import facts_here
    from toolkit.doctor.report import judge
    from toolkit.doctor.request import request_for

    resolved = _here(name, overlays, sets)
    report = judge(facts_here(request_for(resolved.profile)), resolved.profile, ignored=ignored or [])
    if as_json:
        emit(report.to_json())
    else:
        show_report(report.to_json(), "this machine")
    raise typer.Exit(report.exit_code)


def _here(name: str | None, overlays: Overlays, sets: Sets) -> ResolvedProfile:
    from toolkit.deploy.locate import deployed_services
    from toolkit.profile.loading import load_profile

    if name is None:
        names = [service.name for service in deployed_services()]
        if len(names) != 1:
            said = f"several are deployed here: {', '.join(names)}" if names else "nothing is deployed here"
            raise ConfigError(f"name a profile: {said}", hint="ddtoolkit profiles list shows them")
        name = names[0]
    return load_profile(name, overlays=overlays or (), sets=sets or ())


def _on_hosts(
    name: str | None,
    overlays: Overlays,
    sets: Sets,
    where: fleet.Where,
    *,
    ignored: list[str],
    as_json: bool,
) -> None:
    listed = fleet.begin_listing(where)
    from toolkit.doctor.ask import facts_of
    from toolkit.doctor.report import judge
    from toolkit.doctor.request import request_for
    from toolkit.fleet.many import at_once
    from toolkit.fleet.results import to_json
    from toolkit.profile.loading import load_profile

    known = {} if name is None else {name: load_profile(name, overlays=overlays or (), sets=sets or ())}
    hosts, wanted = _profiles_of(listed(), name, where)
    for other in {item for names in wanted.values() for item in names} - known.keys():
        known[other] = load_profile(other, overlays=overlays or (), sets=sets or ())
    requests = {item: request_for(resolved.profile) for item, resolved in known.items()}

    def look(host: str) -> list[dict[str, Any]]:
        return [
            judge(facts_of(hosts[host], requests[item]), known[item].profile, ignored=ignored).to_json()
            for item in wanted[host]
        ]

    results = at_once(list(hosts), look, limit=where.parallel, grade=_grade)
    if as_json:
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
