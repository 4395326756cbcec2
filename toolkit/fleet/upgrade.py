"""The libraries that an upgrade installs on hosts, each by the profile that is deployed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.build.wheels.house import open_house
from toolkit.errors import ConfigError
from toolkit.fleet.drain import TellHost
from toolkit.fleet.halt import halted
from toolkit.fleet.results import HostResult
from toolkit.fleet.send_wheels import Order
from toolkit.fleet.wheels import (
    HouseThere,
    bring_wheels,
    check_wheels,
    house_of,
    order_from,
    with_house_there,
    with_wheels,
)
from toolkit.inventory.host import Host
from toolkit.profile.loading import profile_from_data


class Libraries:
    """What hosts install, planned before anything is touched and brought before the first restart.

    Args:
        folder: wheelhouse on this machine; None where hosts take libraries from elsewhere.
        hosts: all hosts by name.
        limit: hosts at the same time.

    Raises:
        ToolkitError: the folder is no wheelhouse.
    """

    def __init__(self, folder: Path | None, hosts: Mapping[str, Host], limit: int) -> None:
        self._house = None if folder is None else open_house(folder)
        self._hosts, self._limit = hosts, limit
        self._orders: dict[str, Order] = {}

    def planned(self, previews: Sequence[HostResult]) -> list[HostResult]:
        """The previews of an upgrade, with what comes to each host among the changes.

        Where a host cannot be given its libraries, no other one is begun.
        """
        houses: dict[str, HouseThere] = {}
        plans = []
        for item in previews:
            if item.value is None:
                plans.append(item)
                continue
            profile = profile_from_data(item.value["profile"])
            words = item.value["libraries"] if item.value["changes"] else None
            steps = [] if words is None else [{"action": "libraries", "reasons": [words]}]
            plan = {"steps": steps, "empty": not item.value["changes"]}
            plans.append(replace(item, value={**item.value, "plan": plan}))
            if (there := house_of(profile)) is not None:
                houses[item.host] = there
            if self._house is not None:
                try:
                    self._orders[item.host] = order_from(profile, self._house)
                except ConfigError as error:
                    plans[-1] = HostResult(item.host, error=error)
        plans = with_wheels(plans, self._orders, self._hosts, self._limit)
        plans = with_house_there(plans, houses, self._hosts, self._limit)
        return [_shown(item) for item in halted(plans, "not begun, since {} could not be planned")]

    def check(self, previews: Sequence[HostResult]) -> None:
        """Read what is to be sent.

        Raises:
            ToolkitError: a wheel is damaged; it is named.
        """
        check_wheels(self._orders, previews)

    def bring(self, previews: Sequence[HostResult], tell: TellHost) -> list[HostResult]:
        """Send to the hosts what they lack; where one fails, no other host is begun."""
        return bring_wheels(self._orders, self._hosts, previews, tell, limit=self._limit)


def _shown(item: HostResult) -> HostResult:
    if item.value is None:
        return item
    steps: list[dict[str, Any]] = item.value["plan"]["steps"]
    lines = [f"{step['action']}: {reason}" for step in steps for reason in step["reasons"]]
    return replace(item, value={**item.value, "changes": [*item.value["changes"], *lines]})
