"""`lspci -D -vvv`: bridges, what lies behind them, their links, and ACS (PCI Express specification, 7.7.11).

Only root is shown the capabilities.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_DEVICE = re.compile(r"^([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)$")
_BUS = re.compile(r"Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")
_ACS = re.compile(r"ACSCtl:\s*(.*)$")
_SPEED = re.compile(r"LnkCap:.*?Speed ([\d.]+)GT/s")
_WIDTH = re.compile(r"Lnk(Cap|Sta):.*?Width x(\d+)")


@dataclass(frozen=True, slots=True)
class Device:
    """One PCI function.

    Attributes:
        address: `0000:16:00.0`.
        title: what lspci calls it.
        buses: first and last bus behind it; None where it is no bridge.
        acs: controls of ACS that are on, such as `ReqRedir`; None where it tells of none.
        width: lanes in use; None where it does not tell.
        max_width: lanes it has.
        max_speed: of each lane at most, GT/s.
    """

    address: str
    title: str
    buses: tuple[int, int] | None = None
    acs: frozenset[str] | None = None
    width: int | None = None
    max_width: int | None = None
    max_speed: float | None = None

    @property
    def redirects(self) -> list[str]:
        """The controls that send traffic between GPUs up to the root complex."""
        return sorted((self.acs or frozenset()) & {"ReqRedir", "CmpltRedir"})


def parse_lspci(text: str) -> tuple[Device, ...]:
    """Every device that is told of."""
    found = []
    for block in re.split(r"\n(?=\S)", text):
        lines = block.splitlines()
        head = _DEVICE.match(lines[0]) if lines else None
        if head is not None:
            found.append(_device(head[1], head[2], block, lines))
    return tuple(found)


def _device(address: str, title: str, block: str, lines: Sequence[str]) -> Device:
    bus = _BUS.search(block)
    acs = next((match[1] for line in lines if (match := _ACS.search(line))), None)
    widths = {match[1]: int(match[2]) for line in lines if (match := _WIDTH.search(line))}
    return Device(
        address,
        title,
        None if bus is None else (int(bus[2], 16), int(bus[3], 16)),
        None if acs is None else frozenset(word[:-1] for word in acs.split() if word.endswith("+")),
        widths.get("Sta"),
        widths.get("Cap"),
        None if (speed := _SPEED.search(block)) is None else _speed(speed[1]),
    )


def _speed(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def bridges_above(devices: Sequence[Device], address: str) -> list[Device]:
    """The bridges on the way from the root complex to a device, the nearest to the root first."""
    domain, bus, _ = address.split(":")
    number = int(bus, 16)
    found = [
        (item.buses[0], item)
        for item in devices
        if item.buses is not None
        and item.address.split(":")[0] == domain
        and item.buses[0] <= number <= item.buses[1]
    ]
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]
