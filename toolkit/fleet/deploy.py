"""A deploy on many hosts: plan everywhere, provision where needed, then one transaction a host, in turn."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.doctor.ask import report_of
from toolkit.doctor.preflight import mended_by, preflight
from toolkit.doctor.request import examination
from toolkit.fleet.bare import Bare, bare_of, with_bare
from toolkit.fleet.change import change_in_turn
from toolkit.fleet.connections import Connections
from toolkit.fleet.drain import Balancer, TellHost
from toolkit.fleet.fanout import Fanout, Spread, known_hosts, with_weights
from toolkit.fleet.halt import others_not_begun
from toolkit.fleet.many import at_once
from toolkit.fleet.results import HostResult
from toolkit.fleet.send_wheels import Order
from toolkit.fleet.wheels import HouseThere, house_of, order_of, with_house_there, with_wheels
from toolkit.profile.given import Given
from toolkit.profile.loading import ResolvedProfile
from toolkit.profile.schema import Profile
from toolkit.profile.secrets import SECRETS, require_secrets, resolve_secret
from toolkit.provision.playbook import TaskResult, run_on_hosts
from toolkit.provision.requirements import requirements
from toolkit.release.locate import layout_of
from toolkit.weights.wanted import requests


@dataclass(frozen=True, slots=True)
class Desired:
    """A profile as hosts get it.

    Attributes:
        service: name of profile and service.
        data: its JSON form.
        sources: the files that it was read from.
        secrets: values of its secrets by the server's name for each; never shown.
        settings: the variables of the provision playbook.
        bare: what hosts need that have nothing of the toolkit yet; None where such a host is an error.
        weights: what hosts are asked for, one a checkpoint that is fetched.
        wheels: what they are to have of a wheelhouse here; None where they take libraries from elsewhere.
        house: the folder of wheels on the hosts that the profile names, and the lock that is installed from
            it; None where it names none.
        given: what the deploy was asked for, as it was typed here.
    """

    service: str
    data: dict[str, Any]
    sources: dict[str, str]
    secrets: dict[str, str] = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)
    bare: Bare | None = None
    weights: Sequence[dict[str, Any]] = ()
    wheels: Order | None = None
    house: HouseThere | None = None
    given: Given = field(default_factory=Given)

    def args(self) -> dict[str, Any]:
        """What the agent's `plan` takes."""
        return {
            "profile": self.data,
            "sources": self.sources,
            "secrets": self.secrets,
            "given": self.given.to_json(),
        }

    def orders(self, names: Iterable[str]) -> dict[str, Order]:
        """What each of the hosts is to have of the wheelhouse here; none without one."""
        return {} if self.wheels is None else dict.fromkeys(names, self.wheels)


def desired(resolved: ResolvedProfile, wheelhouse: Path | None = None) -> Desired:
    """A profile for hosts: its secrets are read here and go to a private file of the release there.

    Args:
        resolved: the profile.
        wheelhouse: folder on this machine with wheels that are brought to the hosts.

    Raises:
        ConfigError: a secret cannot be read.
        ToolkitError: the folder is no wheelhouse.
    """
    profile = resolved.profile
    wheels = None if wheelhouse is None else order_of(profile, wheelhouse)
    require_secrets(profile)
    secrets = {
        key.replace("_", "-"): resolve_secret(reference).reveal()
        for key in SECRETS
        if (reference := getattr(profile.service, key)) is not None
    }
    files = {item.path.name: base64.b64encode(item.path.read_bytes()).decode() for item in resolved.sources}
    settings = requirements(profile, layout_of(profile)).settings()
    bare, weights = bare_of(profile, resolved.data), requests(profile)
    house = house_of(profile)
    data, given = resolved.data, resolved.given
    return Desired(profile.name, data, files, secrets, settings, bare, weights, wheels, house, given)


def plan_everywhere(
    wanted: Desired, connections: Connections, *, limit: int, but: Sequence[HostResult] = ()
) -> list[HostResult]:
    """What a deploy would do, by host; the hosts in `but` have a result already."""
    known = {item.host: item for item in but}
    names = [name for name in connections.hosts if name not in known]
    found = at_once(names, lambda name: connections.call(name, "plan", wanted.args()), limit=limit)
    plans = with_bare([*known.values(), *found], wanted.bare)
    plans = with_weights(plans, wanted.weights, connections.hosts, limit)
    plans = with_wheels(plans, wanted.orders(connections.hosts), connections.hosts, limit)
    houses = {} if wanted.house is None else dict.fromkeys(connections.hosts, wanted.house)
    plans = with_house_there(plans, houses, connections.hosts, limit)
    return sorted(plans, key=lambda item: item.host)


def examine(
    profile: Profile,
    wanted: Desired,
    connections: Connections,
    plans: Sequence[HostResult],
    tell: TellHost,
    *,
    ignored: Sequence[str] = (),
    limit: int,
) -> list[HostResult]:
    """Let the doctor look at the hosts on which something will be done, before anything is touched.

    Where it finds on one what would fail, no host is begun.
    """
    planned = {item.host: item.value for item in plans if item.value}
    names = [name for name, value in planned.items() if not value["plan"]["empty"]]

    def one(name: str) -> Any:
        actions = [step["action"] for step in planned[name]["plan"]["steps"]]
        if not planned[name].get("bare"):
            args = {"profile": wanted.data, "actions": actions, "ignored": list(ignored), "host": name}
            return connections.call(name, "preflight", args, partial(tell, name))
        asked = examination(profile, weights=False, ignored=(*ignored, *mended_by(actions)))
        report = report_of(connections.hosts[name], asked)
        preflight(report, lambda *step: tell(name, {"step": list(step)}), name)
        return report.to_json()

    found = {item.host: item for item in at_once(names, one, limit=limit)}
    bad = next((name for name, item in found.items() if item.error is not None), None)
    if bad is None:
        return list(plans)
    return [
        HostResult(item.host, error=found[item.host].error)
        if item.host in found and found[item.host].error is not None
        else HostResult(item.host, skipped=f"not begun, since the doctor found a fault on {bad}")
        if item.ok
        else item
        for item in plans
    ]


def provision(
    wanted: Desired, inventory: Sequence[Path], plans: Sequence[HostResult], tell: TellHost
) -> list[HostResult]:
    """Run the provision playbook where the plan asks for it; a failed host's result becomes its error."""
    names = [item.host for item in plans if item.value and _has(item.value["plan"], "provision")]
    if not names:
        return list(plans)

    def on_task(task: TaskResult) -> None:
        tell(task.host, {"line": f"{task.task}: {task.outcome}"})

    for name in names:
        tell(name, {"step": ["provision", "folders, packages and free space, by Ansible"]})
    failed = run_on_hosts("provision.yml", wanted.settings, inventory, names, on_task=on_task)
    return [HostResult(item.host, error=failed[item.host]) if item.host in failed else item for item in plans]


def preview(wanted: Desired, inventory: Sequence[Path], plans: Sequence[HostResult]) -> list[HostResult]:
    """Run the provision playbook in check mode on every planned host; what it would change joins the plan."""
    names = [item.host for item in plans if item.value is not None]
    if not names:
        return list(plans)
    tasks: list[TaskResult] = []
    failed = run_on_hosts(
        "provision.yml", wanted.settings, inventory, names, on_task=tasks.append, check=True
    )
    found = []
    for item in plans:
        if item.host in failed:
            found.append(HostResult(item.host, error=failed[item.host]))
        elif item.value is None:
            found.append(item)
        else:
            changed = [
                task.to_json() for task in tasks if (task.host, task.outcome) == (item.host, "changed")
            ]
            found.append(replace(item, value={**item.value, "ansible": changed}))
    return found


def bring_weights(
    wanted: Desired,
    connections: Connections,
    plans: Sequence[HostResult],
    tell: TellHost,
    *,
    inventory: Sequence[Path],
    spread: Spread,
) -> list[HostResult]:
    """Bring checkpoints to the hosts that lack them, before anything is built or touched.

    Where one host's transfer fails, no other host is begun.
    """
    lacking = {item.host: item.value.get("weights", []) for item in plans if item.value}
    if not any(lacking.values()):
        return list(plans)
    hosts = {name: connections.hosts[name] for name in lacking}
    known = known_hosts(connections.hosts, wanted.weights, spread, inventory)
    fanout = Fanout(lacking, hosts, known, spread, tell)
    done = {item.host: item for item in fanout.bring(wanted.weights)}
    return others_not_begun(plans, done, "not begun, since the transfer to {} failed")


def build(
    wanted: Desired, connections: Connections, plans: Sequence[HostResult], tell: TellHost, *, limit: int
) -> list[HostResult]:
    """Build on all hosts that get a release, before the first is touched; the manifest joins the plan.

    Where one host's build fails, no other host is begun.
    """
    planned = {item.host: item for item in plans if item.value and _has(item.value["plan"], "release")}

    def one(name: str) -> Any:
        value = planned[name].value
        args = {**wanted.args(), "current": value["current"]}
        return {**value, **connections.call(name, "build", args, lambda message: tell(name, message))}

    built = {item.host: item for item in at_once(list(planned), one, limit=limit)}
    failed = next((item.host for item in built.values() if item.error is not None), None)
    found = [built.get(item.host, item) for item in plans]
    if failed is None:
        return found
    return [
        HostResult(item.host, skipped=f"not begun, since the build on {failed} failed") if item.ok else item
        for item in found
    ]


def deploy_in_turn(
    wanted: Desired,
    connections: Connections,
    plans: Sequence[HostResult],
    options: dict[str, Any],
    tell: TellHost,
    *,
    batch: int,
) -> list[HostResult]:
    """The transactions, `batch` hosts at a time; after a failure no further host is begun.

    Hosts whose plan is empty are left alone, those whose plan failed keep their error.
    """
    planned = {item.host: item.value for item in plans if item.value is not None}
    balancer = Balancer(tell)

    def work(name: str) -> Any:
        plan = planned[name]["plan"]
        args = {
            **wanted.args(),
            **options,
            "service": wanted.service,
            "current": planned[name]["current"],
            "built": planned[name].get("built"),
        }

        def change() -> Any:
            return connections.change(name, "deploy", args, lambda message: tell(name, message))

        if not _has(plan, "restart"):
            return {"plan": plan, **change()}
        serves = partial(connections.serves, name, wanted.service)
        return {"plan": plan, **balancer.drained(connections.hosts[name], change, serves)}

    hosts = [connections.hosts[name] for name, value in planned.items() if not value["plan"]["empty"]]
    done = change_in_turn(hosts, work, wanted.service, balancer, batch=batch)
    changed = {item.host: item for item in done}
    return [changed.get(item.host) or untouched(item) for item in plans]


def untouched(item: HostResult) -> HostResult:
    """The result of a host that could not be planned, or on which there is nothing to do."""
    if item.value is None:
        return item
    return replace(item, value={"plan": item.value["plan"], "outcome": None})


def _has(plan: dict[str, Any], action: str) -> bool:
    return any(step["action"] == action for step in plan["steps"])
