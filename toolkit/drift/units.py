"""The installed units: who may write them, and whether they do their work at boot.

How the unit differs from the one that was started, drop-ins included, is told by the manager's status.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from functools import partial

from toolkit.drift.repair import give_to_root, set_mode
from toolkit.errors import ToolkitError
from toolkit.plan.finding import Drift
from toolkit.release import history
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.release.recovery_unit import install_recovery, recovery_fault
from toolkit.service import unit_files
from toolkit.service.systemctl import properties
from toolkit.service.systemd import RECOVER_UNIT, unit_name

_MODE = 0o644


def masked(host: ServiceHost) -> bool:
    """Whether the service's unit is masked; False also where systemd does not answer."""
    with contextlib.suppress(ToolkitError):
        return properties(unit_name(host.name), ["LoadState"])["LoadState"] == "masked"
    return False


def drifts(host: ServiceHost, *, masked: bool) -> Iterator[Drift]:
    """How the installed units differ from what a deploy leaves.

    Args:
        host: the service.
        masked: whether its unit is masked.
    """
    name = unit_name(host.name)
    if masked:
        fix = f"systemctl unmask {name}, then deploy again"
        yield Drift("unit", name, "is masked: it cannot be started", fix, "loaded", "masked")
    else:
        yield from _file(name)
        # An experiment does not survive a reboot, and what was stopped on request does not start by itself.
        expected = read_experiment(host.paths) is None and not history.stopped_on_request(host.paths)
        if expected and not unit_files.enabled(name):
            yield _not_at_boot(name)
    if (fault := recovery_fault()) is not None:
        fix, whole = f"ddtoolkit restart {host.name} installs it anew", "installed and enabled"
        yield Drift("unit", RECOVER_UNIT, fault, fix, whole, fault, "repair", install_recovery)


def _not_at_boot(name: str) -> Drift:
    said, fix = "is not started at boot", f"systemctl enable {name}"
    if unit_files.installed(name) is None:  # the restart that installs the unit anew also enables it
        return Drift("unit", name, said, fix, "enabled", "disabled", "restart")
    repair = partial(unit_files.enable, name)
    return Drift("unit", name, said, fix, "enabled", "disabled", "repair", repair)


def _file(name: str) -> Iterator[Drift]:
    path = unit_files.path_of(name)
    try:
        status = path.lstat()
    except OSError:
        return  # that it is gone is a part of the status
    mode = stat.S_IMODE(status.st_mode)
    if mode != _MODE:
        seen, expected = f"{mode:04o}", f"{_MODE:04o}"
        said, fix = f"mode {seen}, not {expected}", f"chmod {expected} {path}"
        repair = partial(set_mode, path, _MODE)
        yield Drift("unit", str(path), said, fix, f"mode {expected}", f"mode {seen}", "repair", repair)
    if status.st_uid != 0:
        said, fix = f"belongs to user {status.st_uid}, not to root", f"chown root:root {path}"
        seen, give = f"user {status.st_uid}", partial(give_to_root, path)
        yield Drift("unit", str(path), said, fix, "root", seen, "repair", give)
