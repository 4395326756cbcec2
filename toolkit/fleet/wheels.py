"""Bringing wheels from this machine to the hosts of a deploy, before anything there needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.build.for_profile import from_store, lock_for
from toolkit.build.lock import Lock
from toolkit.build.wheel_store import Wheel
from toolkit.build.wheels.house import House, open_house
from toolkit.errors import ConfigError, ToolkitError
from toolkit.fleet.halt import others_not_begun
from toolkit.fleet.many import at_once
from toolkit.fleet.results import HostResult
from toolkit.fleet.send_wheels import Order, bring, needed_by
from toolkit.fleet.wheels_there import check_there
from toolkit.inventory.host import Host
from toolkit.profile.schema import Profile

_HERE = Host("this machine", {"ansible_connection": "local"})
TellHost = Callable[[str, dict[str, Any]], None]


def order_of(profile: Profile, folder: Path) -> Order:
    """What hosts of a profile are to have of a wheelhouse here.

    Raises:
        ConfigError: nothing is installed for this profile.
        ToolkitError: the folder is no wheelhouse.
    """
    return order_from(profile, open_house(folder))


def order_from(profile: Profile, house: House) -> Order:
    """As `order_of`, of a folder that was opened.

    Raises:
        ConfigError: nothing is installed for this profile.
    """
    lock = lock_for(profile)
    if lock is None:
        why = (
            "its manager is not systemd" if profile.host.python is None else "host.python names what has them"
        )
        raise ConfigError(f"--wheelhouse: no libraries are installed for {profile.name}: {why}")
    return Order(house, lock, profile.host.root, profile.host.min_free_disk)


def with_wheels(
    plans: Sequence[HostResult], orders: Mapping[str, Order], hosts: Mapping[str, Host], limit: int
) -> list[HostResult]:
    """The plans, with what has to come to each host with an order on which libraries are installed."""
    planned = {item.host: item.value for item in plans if item.value and item.host in orders}
    names = [name for name, value in planned.items() if _step(value["plan"]) is not None]
    if not names:
        return list(plans)

    def one(name: str) -> dict[str, Any]:
        value, plan, order = planned[name], planned[name]["plan"], orders[name]
        found = needed_by(hosts[name], order, _nobody)
        at = _step(plan)
        if found is None or at is None:
            return dict(value)
        if found.short:
            raise ToolkitError(
                f"{name}: {found.short}", hint="free some space, or keep less free: host.min_free_disk"
            )
        coming = {"action": "wheels", "reasons": [found.words(order.house)]}
        installing = {"action": "libraries", "reasons": [from_store(order.lock, order.layout)]}
        steps = [*plan["steps"][:at], coming, installing, *plan["steps"][at + 1 :]]
        lacking = [wheel.to_json() for wheel in found.lacking]
        return {**value, "plan": {**plan, "steps": steps}, "wheels": lacking}

    found = {item.host: item for item in at_once(names, one, limit=limit)}
    return [found.get(item.host, item) for item in plans]


@dataclass(frozen=True, slots=True)
class HouseThere:
    """A folder of wheels on the hosts.

    Attributes:
        folder: where it lies there.
        lock: what is installed from it.
        root: folder on the hosts that everything lies below; None for the system's places.
    """

    folder: str
    lock: Lock
    root: str | None


def house_of(profile: Profile) -> HouseThere | None:
    """The wheelhouse that a profile names; None where it names none, or nothing is installed for it."""
    lock, folder = lock_for(profile), profile.host.wheelhouse
    return None if lock is None or folder is None else HouseThere(folder, lock, profile.host.root)


def with_house_there(
    plans: Sequence[HostResult], houses: Mapping[str, HouseThere], hosts: Mapping[str, Host], limit: int
) -> list[HostResult]:
    """The plans; an error for each host on which libraries are to be installed from what will not do."""
    names = [
        item.host for item in plans if item.value and item.host in houses and _from_there(item.value["plan"])
    ]
    if not names:
        return list(plans)

    def one(name: str) -> None:
        there = houses[name]
        check_there(hosts[name], there.lock, there.folder, there.root)

    found = {item.host: item for item in at_once(names, one, limit=limit)}
    return [
        found[item.host] if item.host in found and found[item.host].error is not None else item
        for item in plans
    ]


def check_here(plan: dict[str, Any], profile: Profile) -> None:
    """The same for a deploy on this machine, without SSH.

    Raises:
        ToolkitError: the wheelhouse that the profile names will not do.
    """
    house, name = house_of(profile), _HERE.name
    houses = {} if house is None else {name: house}
    (item,) = with_house_there([HostResult(name, {"plan": plan})], houses, {name: _HERE}, 1)
    if item.error is not None:
        raise item.error


def check_wheels(orders: Mapping[str, Order], plans: Sequence[HostResult]) -> None:
    """Read what is to be sent, before anything is touched anywhere.

    Raises:
        ToolkitError: a wheel is damaged; it is named.
    """
    coming: dict[Path, tuple[House, list[Wheel]]] = {}
    for item in plans:
        if item.value and "wheels" in item.value:
            house = orders[item.host].house
            wheels = coming.setdefault(house.folder, (house, []))[1]
            wheels += [Wheel(*wheel) for wheel in item.value["wheels"]]
    for house, wheels in coming.values():
        house.check(dict.fromkeys(wheels))


def bring_wheels(
    orders: Mapping[str, Order],
    hosts: Mapping[str, Host],
    plans: Sequence[HostResult],
    tell: TellHost,
    *,
    limit: int,
) -> list[HostResult]:
    """Send to the hosts what they lack, side by side; where one fails, no other host is begun."""
    names = [item.host for item in plans if item.value and "wheels" in item.value]
    if not names:
        return list(plans)

    def one(name: str) -> Any:
        order = orders[name]
        tell(name, {"step": ["wheels", f"from {order.house.folder}"]})
        return bring(hosts[name], order, partial(tell, name))

    done = {item.host: item for item in at_once(names, one, limit=limit)}
    return others_not_begun(plans, done, "not begun, since wheels could not be brought to {}")


class Here:
    """The same for a deploy on this machine, without SSH.

    Args:
        order: what this machine is to have.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._needed = False

    def planned(self, plan: dict[str, Any]) -> dict[str, Any]:
        """A plan with what has to come.

        Raises:
            ToolkitError: the folder lacks a wheel, or the disk is too small.
        """
        name = _HERE.name
        (item,) = with_wheels([HostResult(name, {"plan": plan})], {name: self._order}, {name: _HERE}, 1)
        if item.error is not None:
            raise item.error
        self._needed = "wheels" in item.value
        shown: dict[str, Any] = item.value["plan"]
        return shown

    def bring(self, step: Callable[[str, str], None], line: Callable[[str], None]) -> None:
        """Bring what was planned.

        Raises:
            ToolkitError: a wheel is damaged, or the disk is full.
        """
        if self._needed:
            step("wheels", f"from {self._order.house.folder}")
            bring(_HERE, self._order, lambda message: line(str(message.get("line", ""))))


def _step(plan: Mapping[str, Any]) -> int | None:
    """Where in a plan the libraries are installed; None where they are not."""
    return next((at for at, step in enumerate(plan["steps"]) if step["action"] == "libraries"), None)


def _from_there(plan: Mapping[str, Any]) -> bool:
    """Whether libraries are installed, and no wheels brought for them."""
    actions = {step["action"] for step in plan["steps"]}
    return "libraries" in actions and "wheels" not in actions


def _nobody(_: dict[str, Any]) -> None:
    """For what is over in a moment."""
