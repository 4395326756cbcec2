"""Rules across keys: combinations that cannot run, each with its reason, and doubtful ones."""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.profile.nodes import format_path
from toolkit.profile.rules.arguments import argument_rules
from toolkit.profile.rules.decoding import decoding_rules
from toolkit.profile.rules.finding import Finding
from toolkit.profile.rules.hardware import hardware_rules
from toolkit.profile.rules.kernels import kernel_rules
from toolkit.profile.rules.machine import machine_rules
from toolkit.profile.rules.service import service_rules
from toolkit.profile.rules.spread import spread_rules
from toolkit.profile.schema import Profile

__all__ = ["Finding", "check", "warnings"]

_RULES = (
    decoding_rules,
    hardware_rules,
    machine_rules,
    spread_rules,
    kernel_rules,
    service_rules,
    argument_rules,
)


def check(profile: Profile) -> list[Finding]:
    """Everything that the rules have against `profile`: errors (`fatal`) and warnings."""
    return [finding for rules in _RULES for finding in rules(profile)]


def warnings(profile: Profile) -> list[Problem]:
    """What is allowed but doubtful in a profile whose files are not at hand, such as a deployed one."""
    return [
        Problem(finding.message, key=format_path(finding.paths[0]), hint=finding.hint)
        for finding in check(profile)
        if not finding.fatal
    ]
