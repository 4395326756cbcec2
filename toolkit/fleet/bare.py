"""Hosts that have nothing of the toolkit yet: what a deploy does there, and bringing them up to an agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolkit.build.environment import Environment
from toolkit.build.for_profile import arguments, environment_of, lock_for, to_install
from toolkit.build.libraries.install import MODULE
from toolkit.errors import UnreachableError
from toolkit.fleet.connections import Connections
from toolkit.fleet.drain import TellHost
from toolkit.fleet.many import at_once
from toolkit.fleet.results import HostResult
from toolkit.plan.steps import Desired, Observed, make_plan
from toolkit.profile.schema import Profile
from toolkit.release.locate import layout_of
from toolkit.remote.absence import Absence
from toolkit.remote.agent import NotReadyError, run_module

_NOTHING = "nothing of ddtoolkit is there yet"
_BEGUN = "a deploy was begun there, and has not finished"


@dataclass(frozen=True, slots=True)
class Bare:
    """What a bare host needs before an agent can run there.

    Attributes:
        value: what the agent's `plan` would answer there.
        module: what installs the libraries: a module and its arguments.
        python: the interpreter that has them then.
        libraries: what is installed, in words.
    """

    value: dict[str, Any]
    module: tuple[str, ...]
    python: str
    libraries: str


def bare_of(profile: Profile, data: dict[str, Any]) -> Bare | None:
    """What a bare host needs for a profile; None where the profile names an interpreter there.

    Args:
        profile: the profile.
        data: its JSON form.
    """
    lock = lock_for(profile)
    if lock is None:
        return None
    environment: Environment = environment_of(profile, layout_of(profile))
    libraries = to_install(profile, lock)
    observed = Observed(missing=(_NOTHING,), libraries=libraries)
    plan = make_plan(profile.name, Desired(data, environment, {}), observed)
    value: dict[str, Any] = {"plan": plan.to_json(), "current": None, "undone": [], "bare": True}
    return Bare(value, (MODULE, *arguments(profile, lock)), str(environment.python), libraries)


def with_bare(plans: Sequence[HostResult], bare: Bare | None) -> list[HostResult]:
    """The plans, with one for each host on which no agent runs yet in place of its error."""
    if bare is None:
        return list(plans)
    return [
        HostResult(item.host, _begun(bare.value) if item.error.begun else bare.value)
        if isinstance(item.error, NotReadyError)
        else item
        for item in plans
    ]


def _begun(value: dict[str, Any]) -> dict[str, Any]:
    """What is planned where an earlier deploy was begun."""
    steps = [
        {**step, "reasons": [_BEGUN if reason == _NOTHING else reason for reason in step["reasons"]]}
        for step in value["plan"]["steps"]
    ]
    return {**value, "plan": {**value["plan"], "steps": steps}}


def equip(
    bare: Bare | None,
    args: dict[str, Any],
    connections: Connections,
    plans: Sequence[HostResult],
    tell: TellHost,
    *,
    command: str,
    wait: float,
    limit: int,
) -> list[HostResult]:
    """Install the libraries on the bare hosts and let their own agents plan the rest.

    Args:
        bare: what they need.
        args: of the agent's `plan`.
        connections: the hosts.
        plans: the plans of all hosts.
        tell: told of the progress.
        command: what is done, for the lock.
        wait: seconds to wait for the lock.
        limit: hosts at the same time.
    """
    planned = {item.host: item.value for item in plans if item.value and item.value.get("bare")}
    if bare is None or not planned:
        return list(plans)

    def one(name: str) -> Any:
        tell(name, {"step": ["libraries", _from_where(planned[name]) or bare.libraries]})
        _install(bare, connections, name, tell)
        connections.settle(name, bare.python)
        profile, heard = args["profile"], partial(tell, name)
        connections.reserve(name, profile["name"], command, wait=wait, tell=heard, profile=profile)
        return connections.call(name, "plan", args)

    found = {item.host: item for item in at_once(list(planned), one, limit=limit)}
    return [found.get(item.host, item) for item in plans]


def _from_where(planned: dict[str, Any]) -> str:
    """What the plan says of the libraries: they may come from wheels that were brought."""
    steps = [step for step in planned["plan"]["steps"] if step["action"] == "libraries"]
    return "; ".join(reason for step in steps for reason in step["reasons"])


def _install(bare: Bare, connections: Connections, name: str, tell: TellHost) -> None:
    """Run the installation, and watch it again where the connection breaks: it goes on by itself."""
    host, away = connections.hosts[name], Absence()

    def heard(message: dict[str, Any]) -> None:
        if "connected" not in message:
            away.end()
        tell(name, message)

    while True:
        try:
            run_module(host, bare.module, heard)
        except UnreachableError as error:
            away.wait(error, "the installation goes on", lambda line: tell(name, line))
        else:
            return
