"""Rules across keys: combinations that cannot run, each with its reason, and doubtful ones."""

from __future__ import annotations

from toolkit.profile.rules.arguments import argument_rules
from toolkit.profile.rules.decoding import decoding_rules
from toolkit.profile.rules.finding import Finding
from toolkit.profile.rules.hardware import hardware_rules
from toolkit.profile.rules.service import service_rules
from toolkit.profile.schema import Profile

__all__ = ["Finding", "check"]

_RULES = (decoding_rules, hardware_rules, service_rules, argument_rules)


def check(profile: Profile) -> list[Finding]:
    """Everything that the rules have against `profile`: errors (`fatal`) and warnings."""
    return [finding for rules in _RULES for finding in rules(profile)]
