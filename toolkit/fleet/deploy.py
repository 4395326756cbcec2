"""A deploy on many hosts: plan everywhere, provision where needed, then one transaction a host, in turn."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.deploy.locate import layout_of
from toolkit.fleet.connections import Connections
from toolkit.fleet.drain import TellHost, drained, exit_code_of
from toolkit.fleet.many import at_once, in_turn
from toolkit.fleet.results import HostResult
from toolkit.profile.loading import ResolvedProfile
from toolkit.profile.secrets import resolve_secret
from toolkit.provision.playbook import TaskResult, run_on_hosts
from toolkit.provision.requirements import requirements
from toolkit.remote.agent import NotReadyError


@dataclass(frozen=True, slots=True)
class Desired:
    """A profile as hosts get it.

    Attributes:
        service: name of profile and service.
        data: its JSON form; secrets refer to files on the host.
        sources: the files that it was read from.
        secrets: values of its secrets by path on the host; never shown.
        settings: the variables of the provision playbook.
    """

    service: str
    data: dict[str, Any]
    sources: dict[str, str]
    secrets: dict[str, str] = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)

    def args(self) -> dict[str, Any]:
        """What the agent's `plan` takes."""
        return {"profile": self.data, "sources": self.sources}


def desired(resolved: ResolvedProfile) -> Desired:
    """A profile for hosts: its secrets are read here and go to private files there.

    Raises:
        ConfigError: a secret cannot be read.
    """
    profile = resolved.profile
    layout = layout_of(profile)
    data = dict(resolved.data)
    secrets = {}
    for key in ("api_key", "admin_api_key"):
        reference = getattr(profile.service, key)
        if reference is not None:
            place = str(layout.service(profile.name).state / "given" / key)
            secrets[place] = resolve_secret(reference).reveal()
            data["service"] = {**data["service"], key: {"file": place}}
    files = {item.path.name: base64.b64encode(item.path.read_bytes()).decode() for item in resolved.sources}
    return Desired(profile.name, data, files, secrets, requirements(profile, layout).settings())


def plan_everywhere(wanted: Desired, connections: Connections, *, limit: int) -> list[HostResult]:
    """What a deploy would do, by host; a host that is not ready for the agent needs everything."""

    def plan(name: str) -> Any:
        try:
            return connections.call(name, "plan", wanted.args())
        except NotReadyError as error:
            return {"plan": _everything(wanted, error.message), "current": None, "undone": []}

    return at_once(list(connections.hosts), plan, limit=limit)


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
    by_host = {item.host: item for item in plans}

    def work(name: str) -> Any:
        earlier = by_host[name]
        if earlier.error is not None:
            raise earlier.error
        plan = earlier.value["plan"]
        if plan["empty"]:
            return {"plan": plan, "outcome": None}
        args = {
            **wanted.args(),
            **options,
            "service": wanted.service,
            "secrets": wanted.secrets,
            "current": earlier.value["current"],
        }

        def change() -> Any:
            return connections.change(name, "deploy", args, lambda message: tell(name, message))

        if not _has(plan, "restart"):
            return {"plan": plan, **change()}
        return {"plan": plan, **drained(connections.hosts[name], change, tell)}

    # A host that could not even be planned does not hold up the others: it is not part of the sequence.
    names = [item.host for item in plans if item.error is None]
    changed = [name for name in names if not by_host[name].value["plan"]["empty"]]
    command = f"deploy profile {wanted.service}"
    connections.reserve(changed, wanted.service, command, wait=options["lock_wait"])
    done = {item.host: item for item in in_turn(names, work, batch=batch, grade=exit_code_of)}
    return [done.get(item.host, item) for item in plans]


def _everything(wanted: Desired, reason: str) -> dict[str, Any]:
    steps = [
        {"action": "provision", "reasons": [reason]},
        {"action": "build", "reasons": ["nothing is built yet"]},
        {"action": "release", "reasons": ["first deploy of this service"]},
        {"action": "start", "reasons": ["the service does not run"]},
        {"action": "acceptance", "reasons": [f"level {wanted.data['acceptance']['level']}"]},
    ]
    return {"service": wanted.service, "steps": steps, "empty": False, "downtime": 0.0, "notes": []}


def _has(plan: dict[str, Any], action: str) -> bool:
    return any(step["action"] == action for step in plan["steps"])
