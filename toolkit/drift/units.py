"""The unit as systemd has it: its file, drop-ins, whether it starts at boot, and the recovery unit."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from toolkit.drift.finding import Drift
from toolkit.errors import ToolkitError
from toolkit.release import history
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.recovery_unit import recovery_fault
from toolkit.service import unit_files
from toolkit.service.systemctl import properties, systemctl, systemd_version
from toolkit.service.systemd import RECOVER_UNIT, render_unit, unit_name
from toolkit.service.unit import Unit

_MODE = 0o644
_FACTS = ("DropInPaths", "NeedDaemonReload", "LoadState")


def drifts(host: ServiceHost, unit: Unit, again: str) -> Iterator[Drift]:
    """How the installed units differ from what a deploy installs.

    Args:
        host: the service.
        unit: the unit of its current release.
        again: the command that deploys anew.
    """
    name = unit_name(unit.name)
    restart = f"ddtoolkit restart {unit.name}"
    try:
        text = render_unit(unit, systemd_version())
        facts = properties(name, _FACTS)
    except ToolkitError as error:
        yield Drift("unit", name, error.message, error.hint or again)
        return
    yield from _file(name, text, restart)
    for drop_in in facts["DropInPaths"].split():
        yield Drift("unit", drop_in, f"a drop-in changes {name}", f"remove it, then: {restart}")
    if facts["LoadState"] == "masked":
        yield Drift("unit", name, "is masked: it cannot be started", f"systemctl unmask {name}")
    elif facts["NeedDaemonReload"] == "yes":
        yield Drift("unit", name, "systemd has not read the file on disk", "systemctl daemon-reload")
    # An experiment is not to survive a reboot, and what was stopped on request is not to start by itself.
    expected = read_experiment(host.paths) is None and not history.stopped_on_request(host.paths)
    if expected and facts["LoadState"] != "masked" and not unit_files.enabled(name):
        yield Drift("unit", name, "is not started at boot", f"systemctl enable {name}")
    if (fault := recovery_fault()) is not None:
        yield Drift("unit", RECOVER_UNIT, fault, f"ddtoolkit restart {unit.name} installs it anew")


def _file(name: str, text: str, fix: str) -> Iterator[Drift]:
    path = unit_files.path_of(name)
    installed = unit_files.installed(name)
    if systemctl("is-enabled", name).stdout.strip() == "masked":
        return  # the file is a link to nothing then
    if installed is None:
        yield Drift("unit", str(path), "the unit file is missing", fix)
        return
    if installed != text:
        yield Drift("unit", str(path), "is not the unit of the current release", fix)
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if mode != _MODE:
        yield Drift("unit", str(path), f"mode {mode:04o}, not {_MODE:04o}", f"chmod {_MODE:04o} {path}")
    if status.st_uid != 0:
        yield Drift("unit", str(path), f"belongs to user {status.st_uid}, not to root", f"chown root {path}")
