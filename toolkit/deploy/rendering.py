"""The unit that a deploy would write: with marks where only a host knows the value, or as one host has it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from toolkit.build.for_profile import environment_of, lock_for
from toolkit.build.libraries.install import interpreter
from toolkit.deploy.reuse import built_already
from toolkit.errors import ToolkitError
from toolkit.layout import Layout
from toolkit.profile.loading import differences
from toolkit.profile.recorded import restarts
from toolkit.profile.schema import Profile
from toolkit.release.host import ServiceHost
from toolkit.release.locate import layout_of
from toolkit.release.store import Release
from toolkit.service.command import release_unit, unit_for
from toolkit.service.systemctl import systemd_version
from toolkit.service.systemd import render_unit
from toolkit.service.unit import SecretSource, Unit

Form = Literal["systemd", "argv"]
# Neither can be an id: whoever installs such a unit by hand finds out at once.
RELEASE, ENVIRONMENT = "RELEASE_ID", "ENVIRONMENT_ID"
_STANDS_FOR = {
    RELEASE: "the id that the deploy gives the release",
    ENVIRONMENT: "the digest of the environment that the deploy builds",
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A unit in one form.

    Attributes:
        content: the unit file's text, or the server's arguments.
        notes: what stands for something that was not known, a line each.
    """

    content: str | list[str]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"content": self.content, "notes": list(self.notes)}


def render_anywhere(profile: Profile, form: Form, *, version: int) -> Rendered:
    """The unit without asking a host, and so without a value of this machine that the host will not have.

    Args:
        profile: the profile.
        form: `systemd` or `argv`.
        version: of the host's systemd, which decides what keys are used.

    Raises:
        ConfigError: a value cannot be written in that form.
    """
    layout = layout_of(profile)
    unit = unit_for(
        profile,
        release_dir=layout.service(profile.name).releases / RELEASE,
        layout=layout,
        python=_python(profile, layout),
        environment={"PYTHONPATH": str(layout.environments / ENVIRONMENT)},
    )
    notes = [f"{mark} stands for {words}" for mark, words in _STANDS_FOR.items()]
    if profile.engine.kind == "embedded" and profile.engine.threads is None:
        notes.append("engine.threads is left to the build, which tunes it on the host")
    return _in_form(unit, form, version, notes)


def render_here(profile: Profile, data: dict[str, Any], form: Form) -> Rendered:
    """The unit as a deploy would write it on this host; the one that is there, where nothing would change.

    Args:
        profile: the profile.
        data: its JSON form.
        form: `systemd` or `argv`.

    Raises:
        ConfigError: a value cannot be written in that form.
        ToolkitError: the interpreter that the profile names lacks a library, or systemd does not answer.
    """
    layout = layout_of(profile)
    version = systemd_version() if form == "systemd" else 0
    current = ServiceHost(layout, profile.name).store.current()
    environment = environment_of(profile, layout)
    if current is not None and _same(current, data, environment.digest):
        return _in_form(current.unit, form, version, [])
    built = {"path": str(layout.environments / environment.digest), "python": str(environment.python)}
    manifest = built_already(profile, environment, current) or {"environment": built, "engine": {}}
    folder = layout.service(profile.name).releases / RELEASE
    unit = release_unit(profile, manifest, folder, layout)
    if current is not None and SecretSource() in current.unit.secrets.values():
        unit = replace(unit, secrets={key: SecretSource() for key in unit.secrets})  # brought from elsewhere
    notes = [f"{RELEASE} stands for {_STANDS_FOR[RELEASE]}"]
    if not manifest["engine"] and profile.engine.kind == "embedded" and profile.engine.threads is None:
        notes.append("engine.threads is left to the build, which tunes it on this host")
    return _in_form(unit, form, version, notes)


def _same(current: Release, data: dict[str, Any], digest: str) -> bool:
    """Whether a deploy would make no new release."""
    try:
        built = current.manifest["environment"]["digest"]
        return built == digest and not restarts(differences(current.profile, data))
    except (ToolkitError, KeyError, TypeError):
        return False


def _python(profile: Profile, layout: Layout) -> Path:
    """The interpreter that runs the server; this machine's only where the profile is for this machine."""
    lock = lock_for(profile)
    if lock is not None:
        return interpreter(layout.environments / lock.folder_name)
    python = Path(profile.host.python or sys.executable)
    return python.expanduser() if profile.service.manager == "process" else python


def _in_form(unit: Unit, form: Form, version: int, notes: list[str]) -> Rendered:
    if form == "argv":
        return Rendered(list(unit.argv), tuple(notes))
    comments = "".join(f"# {note}.\n" for note in notes)
    return Rendered(comments + render_unit(unit, version), tuple(notes))
