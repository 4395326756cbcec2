"""Starting what goes on without the command that asked for it."""

from __future__ import annotations

import contextlib

from toolkit.errors import ToolkitError
from toolkit.release.experiment import read_experiment
from toolkit.release.host import ServiceHost
from toolkit.service import detach, transient
from toolkit.service.systemd import unit_name


def spawn(
    host: ServiceHost, what: str, module: str, *arguments: str, releases: tuple[str | None, ...]
) -> str:
    """Run `python -m MODULE ARGUMENTS`, which detaches itself; why it could not be started, "" when it runs.

    Where systemd runs the service it becomes a system unit, which outlives the login of whoever asked.

    Args:
        host: the service.
        what: `transaction` or `timer`; a part of the unit's name.
        module: name of the module.
        arguments: its arguments.
        releases: ids of the releases that it is about.
    """
    if not under_systemd(host, *releases):
        return detach.start_module(module, *arguments)
    service = unit_name(host.name)
    return transient.start_module(
        f"ddtoolkit-{host.name}-{what}",
        f"ddtoolkit {what} of {host.name}",
        module,
        *arguments,
        after=(service,),  # else it would see the service go down with the machine, and take it for a fault
    )


def spawn_timer(host: ServiceHost) -> None:
    """Start the timer of the experiment that is recorded.

    Raises:
        ToolkitError: it cannot be started.
    """
    root = [] if host.layout.root is None else ["--root", str(host.layout.root)]
    experiment = read_experiment(host.paths)
    releases = (experiment.release, experiment.base) if experiment else ()
    if why := spawn(host, "timer", "toolkit.release.timer", host.name, *root, releases=releases):
        raise ToolkitError(f"{host.name}: the experiment's timer cannot be started: {why}")


def under_systemd(host: ServiceHost, *releases: str | None) -> bool:
    """Whether systemd is to run, or runs, one of these releases."""
    for release in releases:
        with contextlib.suppress(ToolkitError):
            if release is not None and host.store.get(release).unit.manager == "systemd":
                return True
    return False
