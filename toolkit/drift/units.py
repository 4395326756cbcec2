"""The installed units: who may write them, and whether they do their work at boot.

How the unit differs from the one that was started, drop-ins included, is told by the manager's status.
"""

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
from toolkit.service.systemctl import properties
from toolkit.service.systemd import RECOVER_UNIT, unit_name

_MODE = 0o644


def drifts(host: ServiceHost) -> Iterator[Drift]:
    """How the installed units differ from what a deploy leaves.

    Args:
        host: the service.
    """
    name = unit_name(host.name)
    try:
        masked = properties(name, ["LoadState"])["LoadState"] == "masked"
    except ToolkitError as error:
        yield Drift("unit", name, error.message, "see: systemctl status")
        return
    if masked:
        yield Drift("unit", name, "is masked: it cannot be started", f"systemctl unmask {name}")
    else:
        yield from _file(name)
        # An experiment does not survive a reboot, and what was stopped on request does not start by itself.
        expected = read_experiment(host.paths) is None and not history.stopped_on_request(host.paths)
        if expected and not unit_files.enabled(name):
            yield Drift("unit", name, "is not started at boot", f"systemctl enable {name}")
    if (fault := recovery_fault()) is not None:
        yield Drift("unit", RECOVER_UNIT, fault, f"ddtoolkit restart {host.name} installs it anew")


def _file(name: str) -> Iterator[Drift]:
    path = unit_files.path_of(name)
    try:
        status = path.lstat()
    except OSError:
        return  # that it is gone is a part of the status
    mode = stat.S_IMODE(status.st_mode)
    if mode != _MODE:
        yield Drift("unit", str(path), f"mode {mode:04o}, not {_MODE:04o}", f"chmod {_MODE:04o} {path}")
    if status.st_uid != 0:
        yield Drift("unit", str(path), f"belongs to user {status.st_uid}, not to root", f"chown root {path}")
