"""Which hosts a command is about, and how a change of them is made."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.inventory.host import Host


@dataclass(frozen=True, slots=True)
class Where:
    """Which hosts, and how many at a time.

    Attributes:
        inventory: inventory files, folders or dynamic sources.
        limit: Ansible host pattern.
        parallel: hosts that are looked at or copied to at the same time.
        batch: hosts that are restarted at the same time.
    """

    inventory: Sequence[Path]
    limit: str | None = None
    parallel: int = 8
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Manner:
    """How a change is made and shown."""

    yes: bool = False
    verbose: bool = False
    as_json: bool = False
    lock_wait: float = 0.0


def where(
    inventory: Sequence[Path] | None, limit: str | None, *, batch: int = 1, parallel: int = 8
) -> Where | None:
    """The hosts that were asked for; None for this machine.

    Raises:
        ConfigError: there is a limit without an inventory.
    """
    if limit is not None and not limit.strip():
        raise ConfigError("--limit is empty: it would mean every host", hint="leave it out if that is meant")
    if inventory:
        return Where(inventory, limit, parallel, batch)
    if limit is not None:
        raise ConfigError("--limit needs an inventory", hint="add -i inventory.yaml")
    return None


def service_of(name: str | None, where: Where, found: Callable[[], list[Host]]) -> str:
    """The service that a command on hosts is about: the named one, or the only one that they carry.

    Raises:
        ConfigError: none is named, and the hosts carry several or none.
    """
    if name is not None:
        return name
    from toolkit.inventory.host import only_profile

    return only_profile(found(), limit=where.limit)


def begin_listing(where: Where) -> Callable[[], list[Host]]:
    """Begin to read the inventory: Ansible takes a while in a process of its own, which imports here can use.

    Returns:
        Waits for the hosts; raises what reading them raised.
    """
    answers: queue.SimpleQueue[list[Host] | BaseException] = queue.SimpleQueue()

    def read() -> None:
        from toolkit.inventory.load import load_hosts

        try:
            answers.put(load_hosts(where.inventory, limit=where.limit))
        except BaseException as error:  # raised where the hosts are waited for
            answers.put(error)

    threading.Thread(target=read, daemon=True).start()

    @cache
    def wait() -> list[Host]:
        found = answers.get()
        if isinstance(found, BaseException):
            raise found
        return found

    return wait


def carrying(hosts: Sequence[Host], where: Where, profile: str) -> list[Host]:
    """Those of the hosts that carry the profile.

    Raises:
        ConfigError: none does.
    """
    from toolkit.inventory.host import hosts_with

    return hosts_with(hosts, profile, limit=where.limit)
