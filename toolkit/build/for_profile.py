"""Which environment a profile is served from, and having its libraries installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.build.environment import Environment, environment_under, locked_environment
from toolkit.build.libraries.install import damage, ensure
from toolkit.build.libraries.place import install_in_unit, place_in
from toolkit.build.lock import Lock, lock_of
from toolkit.build.wheel_store import Store
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.schema import Profile
from toolkit.service.detached import may_detach


def lock_for(profile: Profile) -> Lock | None:
    """The lock that a profile's libraries are of; None where an interpreter there has them already."""
    return lock_of(profile.engine.kind) if profile.installs_libraries else None


def environment_of(profile: Profile, layout: Layout) -> Environment:
    """The environment that a release of `profile` would have.

    Raises:
        ToolkitError: the interpreter that the profile names lacks a library.
    """
    lock = lock_for(profile)
    if lock is None:
        return environment_under(profile.host.python, profile.engine.kind)
    return locked_environment(lock, layout.environments)


def lacking(profile: Profile, layout: Layout) -> str | None:
    """What has to be installed for a profile and from where, in words; None where nothing has."""
    lock = lock_for(profile)
    if lock is None or damage(layout.environments / lock.folder_name, lock.sha256) is None:
        return None
    return from_store(lock, layout) if Store(layout).brought(lock) else to_install(profile, lock)


def to_install(profile: Profile, lock: Lock) -> str:
    """What is to be installed on a host to which no wheels were brought, and from where, in words."""
    source = profile.host.wheelhouse
    where = "the package index" if source is None else f"the wheelhouse {source}"
    return f"{lock.folder_name}: the locked libraries of the {lock.engine} engine, from {where}"


def from_store(lock: Lock, layout: Layout) -> str:
    """What is to be installed from wheels that were brought, or will be by then, in words."""
    return f"{lock.folder_name}: the locked libraries of the {lock.engine} engine, from {layout.wheels}"


def arguments(profile: Profile, lock: Lock) -> list[str]:
    """Of `python -m toolkit.build.libraries`."""
    words = [lock.engine]
    if profile.host.root is not None:
        words += ["--root", str(Path(profile.host.root).expanduser().absolute())]
    if profile.host.wheelhouse is not None:
        words += ["--wheelhouse", profile.host.wheelhouse]
    return words


def install(profile: Profile, layout: Layout, say: Callable[[str], None]) -> None:
    """Have the libraries of a profile installed on this machine, by a transient unit where there is systemd.

    Raises:
        ToolkitError: a hash differs, a library is missing, the disk is full; what serves was not touched.
    """
    lock = lock_for(profile)
    if lock is None or lacking(profile, layout) is None:
        return
    if not may_detach():
        wheelhouse = None if profile.host.wheelhouse is None else Path(profile.host.wheelhouse)
        ensure(lock, place_in(layout, lock, wheelhouse), say)
        return
    last: dict[str, Any] = {}

    def tell(value: dict[str, Any]) -> None:
        last.update(value)
        if "line" in value:
            say(str(value["line"]))

    if install_in_unit(lock, arguments(profile, lock), layout.state, tell):
        raise ToolkitError(str(last.get("error")), hint=last.get("hint"))
