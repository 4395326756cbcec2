"""Which services are deployed on this machine, and where.

A profile may put its service anywhere, and may be edited, moved or deleted afterwards. So each deploy leaves
a small record of name and root in the user's state folder (XDG Base Directory Specification).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from toolkit.errors import ConfigError, ToolkitError
from toolkit.files import parse_json, read_bytes
from toolkit.layout import Layout, records
from toolkit.profile.lookup import profile_files
from toolkit.profile.schema import Profile
from toolkit.release.host import ServiceHost
from toolkit.release.store import Release


@dataclass(frozen=True, slots=True)
class Deployed:
    """A service on this machine."""

    name: str
    layout: Layout


def layout_of(profile: Profile) -> Layout:
    """Where the profile's host section puts everything."""
    root = profile.host.root
    return Layout(None if root is None else Path(root).expanduser().absolute())


def deployed_services() -> list[Deployed]:
    """All services deployed here by this user, by name."""
    return [item for item in recorded_services() if item.layout.service(item.name).base.is_dir()]


def recorded_services() -> list[Deployed]:
    """Those, and the ones whose history is left of them."""
    found = []
    for record in sorted(records().glob("*.json")):
        try:
            root = parse_json(read_bytes(record))["root"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(Deployed(record.stem, Layout(None if root is None else Path(root))))
    return found


def find_service(name: str | None) -> Deployed:
    """The deployed service called `name`, or the only one when no name is given.

    One that was removed is found by its name for as long as its history is kept.

    Raises:
        ConfigError: none is deployed, or several are and no name was given.
    """
    services = deployed_services()
    names = ", ".join(service.name for service in services) or "none"
    if name is None:
        if len(services) == 1:
            return services[0]
        if not services:
            raise ConfigError("no service is deployed on this machine", hint=_without_any())
        raise ConfigError(f"several services are deployed here: {names}", hint="name one of them")
    for service in services:
        if service.name == name:
            return service
    for service in recorded_services():
        if service.name != name:
            continue
        if service.layout.service(name).history.is_file():
            return service
        raise ConfigError(
            f"{name}: its first deploy was begun, and has not come to a release yet", hint=_go_on(name)
        )
    raise ConfigError(
        f"no service {name!r} is deployed on this machine (deployed: {names})",
        hint=_instead(name, [service.name for service in services]),
    )


def begun_services() -> list[Deployed]:
    """Those of which there is a record alone: a first deploy, or a removal, did not come to its end."""
    found = [(item, item.layout.service(item.name)) for item in recorded_services()]
    return [item for item, paths in found if not paths.base.is_dir() and not paths.history.is_file()]


def _go_on(name: str) -> str:
    """The next step where a first deploy was begun."""
    return (
        f"if it is not running any more: ddtoolkit deploy profile {name} goes on with it, "
        f"ddtoolkit uninstall {name} --purge takes away what it has made"
    )


def _without_any() -> str:
    """The next step where nothing is deployed; what was removed is found by its name alone."""
    if begun := begun_services():
        return f"the first deploy of {begun[0].name} was begun; {_go_on(begun[0].name)}"
    removed = [item.name for item in recorded_services() if item.layout.service(item.name).history.is_file()]
    told = f"; ddtoolkit history {removed[0]} has the history of what was removed" if removed else ""
    return f"ddtoolkit deploy profile local-cpu{told}"


def _instead(name: str, services: Sequence[str]) -> str:
    """The next step for a name under which nothing is deployed."""
    if near := get_close_matches(name, services, n=1):
        return f"did you mean {near[0]}?"
    known: list[str] = []
    with contextlib.suppress(ToolkitError):  # what a controller brings to a host has no profiles
        known = [profile for profile, _ in profile_files()]
    if name in known:
        return f"ddtoolkit deploy profile {name}"
    if services:
        return f"name one that is: {', '.join(services)}"
    return "ddtoolkit profiles list shows what can be deployed"


def find_removable(name: str | None) -> Deployed:
    """As `find_service`, and also what a first deploy or a removal that was cut off has left of one.

    Raises:
        ConfigError: there is nothing of it, or several are deployed and no name was given.
    """
    try:
        return find_service(name)
    except ConfigError:
        for service in recorded_services():
            if service.name == name:
                return service
        if name is None and not deployed_services() and len(begun := begun_services()) == 1:
            return begun[0]
        raise


def remember(service: Deployed) -> None:
    """Record where a service lies, before anything is deployed there.

    Raises:
        ToolkitError: the same name is deployed elsewhere, or the record cannot be written.
    """
    root = None if service.layout.root is None else str(service.layout.root)
    for other in deployed_services():
        if other.name == service.name and other.layout.root != service.layout.root:
            raise ToolkitError(
                f"service {service.name!r} is already deployed below {other.layout.root or '/opt/ddtoolkit'}",
                hint="deploy it there, or give this profile another name",
            )
    record = records() / f"{service.name}.json"
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        # One name, so that what a killed process leaves is written over; whoever does this writes the same.
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps({"root": root}), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            temporary.replace(record)
    except OSError as error:
        raise ToolkitError(f"cannot write {record}: {error.strerror}") from None


def forget(service: Deployed) -> None:
    """Remove the record that `remember` made, and the folders that hold nothing else."""
    record = records() / f"{service.name}.json"
    record.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # one that holds something else, and all above it, stay
        for folder in list(record.parents)[:4]:
            folder.rmdir()


def current_release(service: Deployed) -> Release:
    """The release that is to serve.

    Raises:
        ConfigError: nothing was deployed yet.
    """
    current = ServiceHost(service.layout, service.name).store.current()
    if current is None:
        raise ConfigError(
            f"service {service.name!r} has no release yet", hint=f"ddtoolkit deploy profile {service.name}"
        )
    return current
