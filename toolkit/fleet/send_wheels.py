"""Bringing wheels to one host, over the SSH connection by which everything else reaches it.

Only what the host lacks is sent, and of a wheel that was on its way only the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.build.lock import Lock
from toolkit.build.wheel_store import Wheel
from toolkit.build.wheelhouse import Target
from toolkit.build.wheels.house import House
from toolkit.errors import ToolkitError, UnreachableError
from toolkit.inventory.host import Host
from toolkit.layout import Layout
from toolkit.remote.absence import Absence
from toolkit.remote.agent import Agent, module_on
from toolkit.remote.protocol import error_from_json
from toolkit.weights.pace import Meter, size_words

MODULE = "toolkit.build.wheels"
_PIECE = 1 << 18

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What hosts are to have.

    Attributes:
        house: the folder here that it comes from.
        lock: whose wheels.
        root: folder on the hosts that everything lies below; None for the system's places.
        min_free: bytes of the disk that are to stay free there.
    """

    house: House
    lock: Lock
    root: str | None = None
    min_free: int = 0

    @property
    def layout(self) -> Layout:
        """Where things lie on the hosts."""
        return Layout(None if self.root is None else Path(self.root))


@dataclass(frozen=True, slots=True)
class Needed:
    """What one host needs of an order.

    Attributes:
        wheels: all that its environment is made of.
        lacking: those that have to come.
        arrived: bytes of each of these that have come before.
        short: the sum that does not fit on its disk, in words; None where it does.
    """

    wheels: Sequence[Wheel]
    lacking: Sequence[Wheel]
    arrived: Mapping[str, int]
    short: str | None

    @property
    def bytes(self) -> int:
        """Bytes that have to come."""
        return sum(wheel.size - self.arrived[wheel.name] for wheel in self.lacking)

    def words(self, house: House) -> str:
        """What is sent, for the plan."""
        count = len(self.wheels) - len(self.lacking)
        there = f", {count} of {len(self.wheels)} are there" if count else ""
        return f"{len(self.lacking)} files, {size_words(self.bytes)}, from {house.folder} here{there}"


def needed_by(host: Host, order: Order, tell: Tell) -> Needed | None:
    """What a host needs; None where the libraries are installed there already. Changes nothing.

    Raises:
        UnreachableError: the host cannot be reached.
        ConfigError: the folder lacks wheels for this host.
    """
    with module_on(host, [MODULE]) as agent:
        talk = _Talk(agent, order, tell)
        wheels = talk.look()
        return None if wheels is None else talk.needed("plan", wheels)


def bring(host: Host, order: Order, tell: Tell) -> dict[str, Any]:
    """Have all wheels of an order in a host's store; the connection may break meanwhile.

    Args:
        host: the host.
        order: what.
        tell: called with each message on the way.

    Returns:
        `files` and `bytes` that were sent by the connection that ended it.

    Raises:
        UnreachableError: the host cannot be reached, or was lost for long; what has come stays there.
        ToolkitError: a wheel here is damaged, or the host's disk is full.
    """
    away = Absence()
    while True:
        talk: _Talk | None = None
        try:
            with module_on(host, [MODULE]) as agent:
                talk = _Talk(agent, order, tell)
                return talk.bring()
        except UnreachableError as error:
            if talk is None and not away.begun:
                raise  # it was never there
            if talk is not None and talk.moved:
                away.end()
            away.wait(error, "the wheels that have come stay there", tell)


class _Talk:
    """One connection's requests.

    Attributes:
        moved: whether it brought anything.
    """

    def __init__(self, agent: Agent, order: Order, tell: Tell) -> None:
        self.moved = False
        self._agent = agent
        self._order = order
        self._tell = tell

    def look(self) -> list[Wheel] | None:
        """The wheels that the host takes; None where the libraries are there."""
        lock = self._order.lock
        seen = self._ask("look", {"lock": lock.sha256, "environment": lock.folder_name})
        if seen["installed"]:
            return None
        return self._order.house.wheels_for(lock, Target(seen["python"], seen["machine"]))

    def needed(self, verb: str, wheels: Sequence[Wheel]) -> Needed:
        """What the host lacks of them, by `plan` or `begin`."""
        unpacked = self._order.house.unpacked(wheels)
        listed = [wheel.to_json() for wheel in wheels]
        answer = self._ask(verb, {"wheels": listed, "unpacked": unpacked, "min_free": self._order.min_free})
        arrived = dict(answer["lacking"])
        lacking = [wheel for wheel in wheels if wheel.name in arrived]
        return Needed(wheels, lacking, arrived, answer["short"])

    def bring(self) -> dict[str, Any]:
        """Send what is lacking; what comes damaged is sent once more."""
        wheels = self.look()
        if wheels is None:
            return {"files": 0, "bytes": 0}
        needed = self.needed("begin", wheels)
        self._order.house.check(needed.lacking)
        self._tell({"line": needed.words(self._order.house)})
        begin, sent = time.monotonic(), needed.bytes
        for last in (False, True):
            self._send(needed)
            again = self._end(wheels)
            if not again:
                break
            if last:
                raise ToolkitError(
                    f"{self._agent.name}: {', '.join(again)} came damaged twice",
                    hint="look at the host's disk and memory, then run the same command again",
                )
            self._tell({"line": f"sending once more what came damaged: {', '.join(again)}"})
            wanted = [wheel for wheel in wheels if wheel.name in again]
            needed = Needed(wheels, wanted, dict.fromkeys(again, 0), None)
        seconds = time.monotonic() - begin
        rate = size_words(sent / seconds) if seconds > 0 else "?"
        self._tell({"line": f"{size_words(sent)} sent and checked in {seconds:.1f} s, {rate}/s"})
        return {"files": len(needed.lacking), "bytes": sent}

    def _send(self, needed: Needed) -> None:
        total = sum(wheel.size for wheel in needed.lacking)
        with Meter(total, self._tell) as meter:
            meter.have(total - needed.bytes)
            for wheel in needed.lacking:
                self._send_one(wheel, needed.arrived[wheel.name], meter)

    def _send_one(self, wheel: Wheel, position: int, meter: Meter) -> None:
        with (self._order.house.folder / wheel.name).open("rb") as file:
            file.seek(position)
            # A wheel that is complete but for its new name is asked for with its last piece, which is empty.
            while (piece := file.read(_PIECE)) or position == wheel.size:
                head = {"wheel": wheel.to_json(), "from": position, "count": len(piece)}
                self._write(self._request("put", head) + piece)
                position += len(piece)
                self.moved = self.moved or bool(piece)
                meter.add(len(piece))
                if position >= wheel.size:
                    return

    def _end(self, wheels: Sequence[Wheel]) -> list[str]:
        lock = self._order.lock
        listed = [wheel.to_json() for wheel in wheels]
        answer = self._ask("end", {"wheels": listed, "engine": lock.engine, "lock": lock.text})
        return list(answer["again"])

    def _ask(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        self._write(self._request(verb, fields))
        while verb not in (message := self._agent.receive()):
            self._heed(message)
        return dict(message[verb])

    def _request(self, verb: str, fields: Mapping[str, Any]) -> bytes:
        return json.dumps({"verb": verb, "root": self._order.root, **fields}).encode() + b"\n"

    def _write(self, data: bytes) -> None:
        try:
            self._agent.write(data)
        except UnreachableError:
            # A host that gave up said why before it closed the connection.
            while True:
                self._heed(self._agent.receive())

    def _heed(self, message: dict[str, Any]) -> None:
        """Raise the other side's error, or tell what it tells."""
        if "error" in message:
            raise error_from_json({**message, "message": message["error"]}, self._agent.name)
        if "line" in message:
            self._tell(message)
