"""Making hosts with GPUs ready, one after the other, by the playbook `gpu.yml`: a preview, then for real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.doctor.ask import report_of
from toolkit.doctor.request import examination
from toolkit.errors import EXIT_DIFFERENT, StoppedWatchingError, ToolkitError
from toolkit.fleet.drain import TellHost
from toolkit.fleet.many import in_turn
from toolkit.fleet.results import HostResult
from toolkit.inventory.host import Host
from toolkit.profile.schema import Profile
from toolkit.provision.playbook import TaskResult, run_on_hosts

PLAYBOOK = "gpu.yml"
# Tasks of the role whose messages are for people.
_PLANNED, _PENDING = "Tell what is to be done", "Tell what is pending"
_LIMIT = 3 * 3600.0  # a driver is a long download, a server with eight GPUs a long boot
_IDLE = 2400.0

Look = Callable[[str], Any]


def preview(settings: dict[str, Any], inventory: Sequence[Path], names: Sequence[str]) -> list[HostResult]:
    """What would be done on each host, by Ansible's check mode.

    Returns:
        A result for each host: `planned`, a line each, and `changes`, names of tasks; both empty where there
        is nothing to do.
    """
    tasks: list[TaskResult] = []
    everywhere = {"ddtoolkit_batch": "100%"}
    failed = run_on_hosts(
        PLAYBOOK, settings, inventory, names, on_task=tasks.append, check=True, extra_vars=everywhere
    )
    return [
        HostResult(name, error=failed[name])
        if name in failed
        else HostResult(name, {"planned": _lines(tasks, name, _PLANNED), "changes": _changes(tasks, name)})
        for name in names
    ]


def prepare_in_turn(
    settings: dict[str, Any],
    inventory: Sequence[Path],
    names: Sequence[str],
    tell: TellHost,
    *,
    allow_reboot: bool,
    look: Look,
) -> list[HostResult]:
    """Make hosts ready, one at a time; after a failure no further host is begun.

    Args:
        settings: as `gpu_host_settings` gave them, under the key `gpu_host`.
        inventory: the inventory's files, folders or dynamic sources.
        names: the hosts.
        tell: told of the progress.
        allow_reboot: whether a host may be rebooted.
        look: judges a host on which nothing is pending; raises what is wrong there.

    Returns:
        A result for each host: `changes`, and `pending`, why it has to be rebooted; its exit code is 7 then.

    Raises:
        StoppedWatchingError: the user interrupted the command.
    """

    def one(name: str) -> Any:
        tasks: list[TaskResult] = []

        def on_task(task: TaskResult) -> None:
            tasks.append(task)
            if task.outcome != "skipped":
                tell(name, {"line": f"{task.task}: {task.outcome}"})

        tell(name, {"step": ["gpu host", "packages, boot settings and services of the driver, by Ansible"]})
        failed = run_on_hosts(
            PLAYBOOK,
            settings,
            inventory,
            [name],
            on_task=on_task,
            extra_vars={"ddtoolkit_allow_reboot": allow_reboot},
            timeout=_LIMIT,
            idle_timeout=_IDLE,
        )
        if name in failed:
            raise failed[name]
        if failed:  # a hook that runs on the control machine bears its name
            raise next(iter(failed.values()))
        pending = _lines(tasks, name, _PENDING)
        found = {"changes": _changes(tasks, name), "pending": pending}
        return found if pending else {**found, "doctor": look(name)}

    try:
        return [_graded(item) for item in in_turn(names, one, batch=1)]
    except StoppedWatchingError:
        raise StoppedWatchingError(
            f"interrupted; one of {', '.join(names)} may be drained and half changed, and stays so",
            hint="the same command again goes on with it, and puts it back once it serves",
        ) from None


def examine(profile: Profile, hosts: Mapping[str, Host], name: str, *, ignored: Sequence[str]) -> Any:
    """Let the doctor look at a host that was made ready; its report.

    Raises:
        UnreachableError: the host cannot be reached.
        ToolkitError: a check fails, and is not among `ignored`; says all that do.
    """
    report = report_of(hosts[name], examination(profile, weights=False, ignored=ignored))
    if report.failures:
        past = " ".join(
            f"--ignore-check {check}" for check in dict.fromkeys(i.check for i in report.failures)
        )
        raise ToolkitError(
            "\n".join([f"{name}: it was made ready, but the doctor finds:", *report.lines()]),
            hint=f"mend it, or go on all the same with {past}",
        )
    return report.to_json()


def _graded(item: HostResult) -> HostResult:
    return replace(item, code=EXIT_DIFFERENT) if item.value and item.value["pending"] else item


def _lines(tasks: Sequence[TaskResult], name: str, told: str) -> list[str]:
    said = [task.message for task in tasks if task.host == name and task.task.endswith(told)]
    return [line for text in said for line in text.splitlines() if line]


def _changes(tasks: Sequence[TaskResult], name: str) -> list[str]:
    return [task.task for task in tasks if task.host == name and task.outcome == "changed"]
