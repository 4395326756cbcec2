"""Bringing checkpoints to many hosts: to one from the source, to all others from that one.

Peers fetch from the seed over TLS, with a certificate and a token that are made here for this one transfer
(`serve`). Nothing passes through the control machine, and what fetches from a publisher is one host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, ToolkitError
from toolkit.fleet.checkpoints import ask
from toolkit.fleet.many import at_once
from toolkit.fleet.results import HostResult
from toolkit.inventory.host import Host
from toolkit.profile.source import Source
from toolkit.weights.certificate import one_time_certificate
from toolkit.weights.request import wish_of
from toolkit.weights.wanted import Lacking

NO_SEED = "none"
_IDLE = 300.0

TellHost = Callable[[str, dict[str, Any]], None]
Request = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """How checkpoints are spread.

    Attributes:
        limit: hosts at the same time.
        seed: host from which the others fetch; None takes one; `none` lets each fetch for itself.
    """

    limit: int = 8
    seed: str | None = None


@dataclass(frozen=True, slots=True)
class Fanout:
    """A transfer of checkpoints to hosts.

    Attributes:
        lacking: the folders that each host lacks; a host with none has them all.
        hosts: the hosts.
        known: all hosts of the inventory, among which a peer may be.
        spread: how.
        tell: told of the progress.
    """

    lacking: Mapping[str, Sequence[str]]
    hosts: Mapping[str, Host]
    known: Mapping[str, Host]
    spread: Spread
    tell: TellHost

    def bring(self, requests: Sequence[Request]) -> list[HostResult]:
        """Have every host complete.

        Args:
            requests: one a checkpoint.

        Returns:
            A result for each host that lacked something: what it was brought, by folder.

        Raises:
            ConfigError: the seed is no host of the inventory.
        """
        failed: dict[str, HostResult] = {}
        brought: dict[str, dict[str, Any]] = {}
        for request in requests:
            source = wish_of(request).origin.source
            wanting = [name for name in self.hosts if self._lacks(name, source) and name not in failed]
            for item in self._bring(request, source, wanting):
                if item.ok:
                    brought.setdefault(item.host, {})[source.folder] = item.value
                else:
                    failed[item.host] = item
        names = [name for name in self.hosts if self.lacking.get(name)]
        return [failed.get(name) or HostResult(name, brought.get(name, {})) for name in names]

    def _lacks(self, name: str, source: Source) -> bool:
        return source.folder in self.lacking.get(name, ())

    def _bring(self, request: Request, source: Source, wanting: Sequence[str]) -> list[HostResult]:
        """One checkpoint to all that want it."""
        if not wanting:
            return []

        def add(name: str) -> dict[str, Any]:
            self.tell(name, {"step": ["weights", f"{source}"]})
            return ask(self.known[name], "add", request, partial(self.tell, name))

        if self.spread.seed == NO_SEED and source.kind != "peer":
            return at_once(wanting, add, limit=self.spread.limit)
        having = [name for name in self.hosts if name in self.lacking and not self._lacks(name, source)]
        seed = _seed(source, self.spread, having, wanting)
        if seed not in self.known:
            hint = f"one of {', '.join(self.known)}"
            raise ConfigError(f"{source}: {seed} is no host of the inventory", hint=hint)
        first: list[HostResult] = []
        if source.kind != "peer" and seed not in having:
            first = at_once([seed], add, limit=1)
            if not first[0].ok:
                rest = [name for name in wanting if name != seed]
                skipped = f"not begun, since {seed}, which it was to fetch from, failed"
                return [*first, *(HostResult(name, skipped=skipped) for name in rest)]
        others = [name for name in wanting if name != seed]
        done = self._from_seed(request, source, self.known[seed], others) if others else []
        return [item for item in (*first, *done) if item.host in wanting]

    def _from_seed(
        self, request: Request, source: Source, seed: Host, others: Sequence[str]
    ) -> list[HostResult]:
        """Let the others fetch from the seed; one that cannot reach it fetches from the source."""
        grant = _grant(seed)
        try:
            peer = _open(request, source, seed, grant, self.tell)
        except ToolkitError as error:
            return [HostResult(name, error=error) for name in others]

        def one(name: str) -> dict[str, Any]:
            self.tell(name, {"step": ["weights", f"{source.folder} from {seed.name}"]})
            return ask(self.known[name], "add", {**request, "peer": peer}, partial(self.tell, name))

        try:
            return at_once(others, one, limit=self.spread.limit)
        finally:
            with contextlib.suppress(ToolkitError):  # it ends by itself
                ask(seed, "unseed", {"peer": peer}, _nobody)


def _seed(source: Source, spread: Spread, having: Sequence[str], wanting: Sequence[str]) -> str:
    if source.kind == "peer":
        return source.location
    if spread.seed not in (None, NO_SEED):
        return str(spread.seed)
    return (having or wanting)[0]


def _grant(seed: Host) -> dict[str, Any]:
    """What the seed's server is started with."""
    certificate, key = one_time_certificate()
    token = secrets.token_urlsafe(32)
    return {"certificate": certificate, "key": key, "token": token, "port": seed.peer_port, "idle": _IDLE}


def _open(
    request: Request, source: Source, seed: Host, grant: dict[str, Any], tell: TellHost
) -> dict[str, Any]:
    """Start the seed's server; what peers need to fetch from it."""
    answer = ask(seed, "seed", {**request, "grant": grant}, partial(tell, seed.name))
    address = seed.peer_address
    with contextlib.suppress(ValueError):
        address = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    url = f"https://{address}:{answer['port']}/{source.folder}/"
    return {"url": url, "token": grant["token"], "certificate": grant["certificate"]}


def _nobody(_: dict[str, Any]) -> None:
    """For what is over in a moment."""


def known_hosts(
    hosts: Mapping[str, Host], requests: Sequence[Request], spread: Spread, inventory: Sequence[Path]
) -> Mapping[str, Host]:
    """The hosts, and where they are not among them the seed and the peers that are named.

    Raises:
        ConfigError: one of those is no host of the inventory.
    """
    named = {
        source.location for request in requests if (source := wish_of(request).origin.source).kind == "peer"
    }
    named |= {spread.seed} if spread.seed not in (None, NO_SEED) else set()
    if named <= hosts.keys():
        return hosts
    if not inventory:
        raise ConfigError(
            f"{', '.join(sorted(named))}, to fetch checkpoints from, is to be in an inventory",
            hint="add -i inventory.yaml",
        )
    from toolkit.inventory.load import load_hosts

    every = {host.name: host for host in load_hosts(inventory)}
    for name in sorted(named - hosts.keys()):
        if name not in every:
            raise ConfigError(f"{name}, to fetch checkpoints from, is no host of the inventory")
    return {**{name: every[name] for name in named - hosts.keys()}, **hosts}


def with_weights(
    plans: Sequence[HostResult], requests: Sequence[Request], hosts: Mapping[str, Host], limit: int
) -> list[HostResult]:
    """The plans, with what bare hosts lack; hosts with an agent have told that already."""
    names = [item.host for item in plans if item.value and item.value.get("bare")]
    if not requests or not names:
        return list(plans)
    planned = {item.host: item.value for item in plans}

    def one(name: str) -> dict[str, Any]:
        answer = ask(hosts[name], "plan", {"requests": list(requests)}, _nobody)
        missing = Lacking(answer["lacking"], answer["short"])
        missing.require_space()
        value, plan = planned[name], planned[name]["plan"]
        at = next(number for number, step in enumerate(plan["steps"]) if step["action"] == "build")
        mine = [{"action": "weights", "reasons": missing.lines}] if missing.items else []
        steps = [*plan["steps"][:at], *mine, *plan["steps"][at:]]
        return {**value, "plan": {**plan, "steps": steps}, "weights": missing.folders}

    found = {item.host: item for item in at_once(names, one, limit=limit)}
    return [found.get(item.host, item) for item in plans]
