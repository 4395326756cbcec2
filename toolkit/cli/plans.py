"""Showing a plan, and asking before it sets back what was swapped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.cli.output import confirm, say
from toolkit.errors import ConfigError


def show_plan(plan: Mapping[str, Any], where: str, tell: Callable[[str], None]) -> None:
    """Print a plan.

    Args:
        plan: its JSON form.
        where: the host, or `this machine`.
        tell: prints a line: on standard output where the plan is what was asked for.
    """
    if plan["empty"]:
        deployed = "the profile is deployed and the service runs"
        if plan["by_hand"]:
            tell(f"{plan['service']} on {where}: {deployed}, but the host has drifted")
        else:
            tell(f"{plan['service']} on {where}: nothing to do, {deployed}")
        _notes(plan, tell)
        return
    tell(f"plan for {plan['service']} on {where}:")
    for step in plan["steps"]:
        for number, reason in enumerate(step["reasons"]):
            tell(f"  {'' if number else step['action']:<12} {reason}")
    if any(step["action"] == "restart" for step in plan["steps"]):
        known = "unknown" if plan["downtime"] is None else f"about {plan['downtime']:.0f} s"
        tell(f"  expected time without a server: {known}")
    _notes(plan, tell)


def show_ansible(tasks: Sequence[Mapping[str, str]], where: str, tell: Callable[[str], None]) -> None:
    """Print what Ansible would change by its check mode, with its own diff.

    Args:
        tasks: the tasks that would change something, in JSON form.
        where: the host, or `this machine`.
        tell: prints a line.
    """
    if not tasks:
        tell(f"ansible on {where}: would change nothing")
    for task in tasks:
        tell(f"ansible on {where}: would change: {task['task']}")
        for line in task["diff"].splitlines():
            tell(f"  {line}")


def _notes(plan: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    if plan["experiment"]:
        ends = (
            ", and this deploy ends it" if any(step["action"] == "release" for step in plan["steps"]) else ""
        )
        tell(f"  note: {', '.join(plan['tried'])}: an experiment, which {plan['experiment']}{ends}")
    for change in plan["undone_swaps"]:
        if change["key"] in plan["tried"]:
            continue
        tell(f"  note: {change['key']} was swapped since the last deploy, and is set back")
    if plan["lost"]:
        lost = " ".join(plan["lost"])
        tell(f"  note: the current release was deployed with {lost}, this one is not")
    for note in plan["notes"]:
        tell(f"  note: {note}")
    for drift in plan["by_hand"]:
        tell(f"  {'by hand':<12} {drift}")


def confirm_undone(
    undone: Mapping[str, Sequence[str]], lost: Mapping[str, Sequence[str]], *, yes: bool
) -> None:
    """Ask before a deploy sets back what was swapped since the last one, or what that one was given.

    Args:
        undone: lines of the diff, by host.
        lost: options of the last deploy that this one lacks, by host; the plan, shown before, tells them.
        yes: do not ask.

    Raises:
        ConfigError: there is nobody to ask.
        Exit: the answer is no.
    """
    options = list(dict.fromkeys(option for options in lost.values() for option in options))
    swapped = any(undone.values())
    if yes or not (swapped or options):
        return
    for where, lines in undone.items():
        if lines:
            say(f"{where}: this deploy sets back what was swapped since the last one:")
        for line in lines:
            say(f"  {line}")
    if not sys.stdin.isatty():
        if swapped:
            said, hint = "swapped keys would be set back", "--yes to set them back, or --set to keep a value"
        else:
            said = f"what the current release was deployed with would be set back: {' '.join(options)}"
            hint = f"{' '.join(options)} to keep it, or --yes to deploy without it"
        raise ConfigError(said, hint=f"add {hint}")
    confirm("set them back?" if swapped else f"deploy without {' '.join(options)}?")


def confirm_loss(where: Sequence[str], service: str, *, yes: bool, change: str = "swap") -> None:
    """Ask before a change keeps an experiment by which it would be undone; the notes, shown before, tell why.

    Args:
        where: hosts on which that is known, or this machine's service.
        service: name of the service.
        change: `swap` or `deploy`.
        yes: do not ask.

    Raises:
        ConfigError: there is nobody to ask.
        Exit: the answer is no.
    """
    if yes or not where:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{', '.join(where)}: the {change} would be undone: what it keeps was judged as worse already",
            hint=f"add --new-baseline to keep it all the same, or --yes to have it judged again; "
            f"ddtoolkit rollback {service} ends the experiment",
        )
    confirm("have it judged again all the same?")
